"""Make ``expected.json`` beside this file: what lm-eval's own tasks ``gsm8k`` and ``gsm8k_cot`` make of the invented items and answers.

    python -m venv V && V/bin/pip install lm-eval==0.4.13 && HF_HUB_OFFLINE=1 V/bin/python tests/vectors/gsm8k/make.py

The answers' texts are read from the old ``expected.json``. Not run by the tests: lm-eval brings a hundred distributions with it.
"""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

HERE = Path(__file__).parent
FOLDER = Path(lm_eval.__file__).parent / "tasks" / "gsm8k"


def made(name: str, file: str, own: dict[str, Any], old: list[dict[str, Any]]) -> dict[str, Any]:
    """What a task makes; ``own`` are changes of its configuration besides where its items are."""
    config = yaml.safe_load((FOLDER / file).read_text(encoding="utf-8"))
    del config["dataset_name"]
    files = {"train": str(HERE / "train.jsonl"), "test": str(HERE / "test.jsonl")}
    config |= {"dataset_path": "json", "dataset_kwargs": {"data_files": files}, **own}
    task = ConfigurableTask(config=config)
    task.set_fewshot_seed(1234)
    items, shots = list(task.test_docs()), config["num_fewshot"]
    answers = []
    for given in old:
        text = given["text"]
        for stop in config["generation_kwargs"]["until"]:
            text = text.split(stop)[0]
        asked = Instance(request_type="generate_until", doc=items[given["item"]], arguments=("", {}), idx=0, metadata=(name, 0, 1))
        asked.resps = [text]
        for ensemble in task._filters:
            ensemble.apply([asked])
        found = {"item": given["item"], "text": given["text"]}
        for ensemble, reading in (("strict-match", "strict"), ("flexible-extract", "flexible")):
            found[reading] = asked.filtered_resps[ensemble]
            found[f"{reading}_right"] = bool(task.process_results(items[given["item"]], [found[reading]])["exact_match"])
        answers.append(found)

    def chat(item: Any, multiturn: bool) -> Any:
        kept: list[Any] = []

        def template(messages: Any, add_generation_prompt: bool) -> str:
            assert add_generation_prompt
            kept.extend(messages)
            return ""

        task.fewshot_context(item, shots, apply_chat_template=True, fewshot_as_multiturn=multiturn, chat_template=template)
        return kept

    return {
        "definition_sha256": hashlib.sha256((FOLDER / file).read_bytes()).hexdigest(),
        "shots": shots,
        "prompts": [task.fewshot_context(item, shots) for item in items],
        "chats": [chat(item, False) for item in items],
        "multiturn": [chat(item, True) for item in items],
        "answers": answers,
    }


old = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
first = {"num_fewshot": 2, "fewshot_config": {"sampler": "first_n"}}
new = {
    "lm_eval": version("lm-eval"),
    "gsm8k": made("gsm8k", "gsm8k.yaml", first, old["gsm8k"]["answers"]),
    "gsm8k_cot": made("gsm8k_cot", "gsm8k-cot.yaml", {}, old["gsm8k_cot"]["answers"]),
}
(HERE / "expected.json").write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
