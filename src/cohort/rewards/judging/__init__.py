"""The two programs that run Python tests in sandboxes: ``judge.py`` runs the tests, ``serve.py`` the tested program.

The files in this folder run under ``python -I -S``: they import each other and the standard library only.
"""
