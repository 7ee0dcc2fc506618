"""Questions about documents that were read once: each comes out of a file (a KV module), and can be hidden.

python examples/documents.py [MODEL]. Where the folder stays, the next run needs no reading. It says
masked 73 tokens in 0.5 ms · gap closed · exact: no visible token was computed while it was visible
"""

import sys
import tempfile

from edgekv import Model, Session, prefill
from edgekv.chat import Chat, Options

DOCUMENTS = {
    "ferry": "The ferry Corvina was built in 1962 at the Lindholm yard. She carries 90 passengers and 14 cars. Her "
    "captain is Ruth Amsel. She leaves Tolleby at 7:15 every morning and needs 50 minutes to cross to Halsay. On "
    "Sundays she does not sail.",
    "orchard": "The orchard at Marsh Lane has 340 apple trees and 60 pear trees. It belongs to Peter Novak, who "
    "planted it in 1988. The apples are picked in the second half of September. A crate of apples costs 12 euros at "
    "the gate.",
}


def ask(chat: Chat, question: str) -> None:
    """On a fork, so that no answer is in view of the next question."""
    fork = chat.fork()
    with fork.session:
        reply = fork.ask(question)
        print(f"? {question}\n  {reply.text}\n  [{reply.timings}]")


with tempfile.TemporaryDirectory() as folder, Model(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as model:
    for name, text in DOCUMENTS.items():
        made = prefill(f"{text}\n\n", f"{folder}/{name}.kv", model)
        print(f"{name}: {made.tokens} tokens read in {made.read_ms:.0f} ms, {made.size / 1e6:.1f} MB")
    with Session(model, n_ctx=1024) as session:
        chat = Chat(session, system="Answer from the documents, in one short sentence.", options=Options(max_tokens=40))
        for name in DOCUMENTS:
            print(chat.attach(f"{folder}/{name}.kv"))
        ask(chat, "When was the ferry built?")
        ask(chat, "What does a crate of apples cost?")
        print(chat.mask("ferry"))
        ask(chat, "When was the ferry built?")
        ask(chat, "What does a crate of apples cost?")
