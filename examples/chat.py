"""A conversation that never ends: the oldest exchanges go when the cache is full, and nothing is read again.

    python examples/chat.py [MODEL]           # a line is a message, Ctrl-D ends
    echo "Name three fruits." | python examples/chat.py
"""

import sys

from edgekv import Session, policies
from edgekv.chat import Chat, Options

with Session(sys.argv[1] if len(sys.argv) > 1 else "smollm2", n_ctx=1024) as session:
    chat = Chat(session, system="You are a terse assistant.", options=Options(policies.hide_oldest(), max_tokens=120))
    for line in sys.stdin:
        for piece in chat.ask(line.strip()):
            print(piece, end="", flush=True)
        print()
