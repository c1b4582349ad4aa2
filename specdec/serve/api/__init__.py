"""The APIs of the server: for each, its requests and its answers.

All translate to a chat or a completion (`chat.py`, `completions.py`), and from the same events.
"""
