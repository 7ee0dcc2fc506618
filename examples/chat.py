"""A chat without an end: when the cache is full, the oldest exchanges are hidden, and what stays is not read again.

A line is a message, Ctrl-D ends: python examples/chat.py [MODEL]. After ten questions it says
[352 tokens in view, 393 hidden; 0 read again, where restarts would have read 517]
"""

import sys

from edgekv import Session, policies
from edgekv.chat import Chat, Options

with Session(sys.argv[1] if len(sys.argv) > 1 else "smollm2", n_ctx=512) as session:
    options = Options(policy=policies.hide_oldest(), max_tokens=100)
    chat = Chat(session, system="You are a helpful assistant.", options=options)
    for line in filter(str.strip, sys.stdin):
        for piece in chat.ask(line.strip()):
            print(piece, end="", flush=True)
        print()
    now = session.stats
    print(f"[{now.visible} tokens in view, {now.masked + now.evicted} hidden; ", end="")
    print(f"{now.reread} read again, where restarts would have read {now.reused}]")
