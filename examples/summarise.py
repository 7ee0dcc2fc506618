"""Sum a long text up, and hide it: with the summary kept where it was said, or read again without the text in view.

python examples/summarise.py [MODEL]. A kept summary is not read at all, but was computed in view of the text, and
carries it. A clean one is said on a fork (which reads the request, too; that is not counted) and read in the text's
place: it carries no more of the text than it says. SmolLM2-135M mixes names up either way. It says
masked 178 tokens in 2.5 ms · gap closed · 116 visible tokens were computed while it was visible [15 for the clean one]
"""

import sys

from edgekv import Session
from edgekv.chat import Chat, Options

SYSTEM = (  # as in the summaries that SmolLM2 was trained on
    "Provide a concise, objective summary of the input text in up to three sentences, focusing on key actions and "
    "intentions without using second or third person pronouns."
)
TEXT = """Minutes of the garden club

The garden club met in the greenhouse on 4 May. Anna Berg, Tom Reyes and Lucy Ito were there. Anna told us that the \
old water pump is broken. A repair would cost 180 euros, and a new pump costs 240 euros. After a short discussion we \
decided to buy a new pump, and Tom will order it by Friday. Until it is here, Lucy waters the tomatoes by hand every \
evening.

We also talked about the summer party. It will be on 21 June in the garden. Anna asks the school for tables and \
chairs, and everybody brings a cake. Last year 85 people came, so we need more cups this time. Tom will look for some \
in the cellar."""
QUESTION = "What did the club decide about the pump?"


def sum_up(chat: Chat, *, kept: bool) -> None:
    session = chat.session
    before = session.stats
    hidden = chat.summarize(keep=1, kept=kept)
    after = session.stats
    print(f"{'kept' if kept else 'clean'}: hid {', '.join(f'{cut.name} ({cut.tokens} tokens)' for cut in hidden)}")
    print(f"  read {after.prefilled - before.prefilled}, read again: {after.reread - before.reread}")
    for receipt in session.history:
        print(f"  {receipt}")
    summary = next(m.content for m in chat.messages if m.role == "assistant" and "summary" in m.tags)
    print(f"  {summary}\n? {QUESTION}\n  {chat.ask(QUESTION).text}\n")


with Session(sys.argv[1] if len(sys.argv) > 1 else "smollm2", n_ctx=1024) as session:
    chat = Chat(session, system=SYSTEM, options=Options(max_tokens=20, summary_tokens=71))
    for content, answer in ((TEXT, "I have read it."), ("Thanks.", "Sure.")):
        chat.add("user", content)
        chat.add("assistant", answer)
    for kept in (True, False):  # each on a fork: both begin with the same conversation
        fork = chat.fork()
        with fork.session:
            sum_up(fork, kept=kept)
