"""The tests: a frozen spec in, a result folder out. No database is known here.

Of :mod:`ledger` this package imports ``errors``, ``digest`` and ``records`` only,
so that a GPU host needs nothing of the archive.
"""
