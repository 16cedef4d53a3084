"""Make ``expected.json`` beside this file: what lm-eval's own ``gsm8k`` task makes of the invented items and answers.

    python -m venv V && V/bin/pip install lm-eval==0.4.13 && HF_HUB_OFFLINE=1 V/bin/python tests/vectors/gsm8k/make.py

The answers' texts are read from the old ``expected.json``. Not run by the tests: lm-eval brings a hundred distributions with it.
"""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

import lm_eval
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

HERE = Path(__file__).parent
DEFINITION = Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"

config = yaml.safe_load(DEFINITION.read_text(encoding="utf-8"))
del config["dataset_name"]
config |= {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {side: str(HERE / f"{side}.jsonl") for side in ("train", "test")}},
    "num_fewshot": 2,
    "fewshot_config": {"sampler": "first_n"},
}
task = ConfigurableTask(config=config)
task.set_fewshot_seed(1234)
items = list(task.test_docs())
answers = []
for given in json.loads((HERE / "expected.json").read_text(encoding="utf-8"))["answers"]:
    text = given["text"]
    for stop in config["generation_kwargs"]["until"]:
        text = text.split(stop)[0]
    asked = Instance(request_type="generate_until", doc=items[given["item"]], arguments=("", {}), idx=0, metadata=("gsm8k", 0, 1))
    asked.resps = [text]
    for ensemble in task._filters:
        ensemble.apply([asked])
    found = {"item": given["item"], "text": given["text"]}
    for name, reading in (("strict-match", "strict"), ("flexible-extract", "flexible")):
        found[reading] = asked.filtered_resps[name]
        found[f"{reading}_right"] = bool(task.process_results(items[given["item"]], [found[reading]])["exact_match"])
    answers.append(found)
made = {
    "lm_eval": version("lm-eval"),
    "definition_sha256": hashlib.sha256(DEFINITION.read_bytes()).hexdigest(),
    "prompts": [task.fewshot_context(item, 2) for item in items],
    "answers": answers,
}
(HERE / "expected.json").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
