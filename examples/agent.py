"""An agent whose old tool results are cleared: what it noted of them stays, and nothing is read again.

python examples/agent.py [MODEL]. The model chooses which invoice to open next, and notes what it comes to; a JSON
schema holds it to calls that can be carried out, to which a model of 135M would not keep. It says
cleared 'Invoice of Albrecht': masked 88 tokens in 0.3 ms · gap closed · 152 visible tokens were computed while [...]
"""

import json
import sys
from typing import Any

from edgekv import Sampling, Session, policies
from edgekv.chat import Chat, Options

INVOICES = {  # supplier: (what, how many, euros each)
    "Albrecht": [("larch boards", 12, 9), ("boxes of screws", 3, 7), ("wood glue", 2, 11)],
    "Brandt": [("window frames", 2, 84), ("putty", 1, 6), ("white paint", 3, 19)],
    "Cerny": [("roof tiles", 120, 2), ("gutters", 4, 13), ("boxes of nails", 2, 5)],
    "Dietz": [("rolls of cable", 2, 31), ("sockets", 8, 4), ("lamps", 3, 22)],
}


def total(supplier: str) -> int:
    return sum(number * price for _, number, price in INVOICES[supplier])


def read_invoice(supplier: str) -> str:
    """The tool."""
    rows = [f"{number} x {what}, {each} euros each: {number * each} euros" for what, number, each in INVOICES[supplier]]
    terms = "Delivered to the yard, to be paid within 30 days. Goods stay ours until they are paid."
    return "\n".join([f"Invoice of {supplier}", *rows, terms, f"Total: {total(supplier)} euros"])


def only(**properties: dict[str, Any]) -> Sampling:
    """Greedy, and an object with these properties and no others."""
    return Sampling(
        json_schema={
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    )


with Session(sys.argv[1] if len(sys.argv) > 1 else "smollm2", n_ctx=1024) as session:
    policy = policies.clear_tool_uses(trigger=300, keep=1)  # beyond 300 tokens, all results but the newest go
    chat = Chat(session, system="You read invoices and note what they come to.", options=Options(policy))
    chat.add("user", "What do the four invoices come to?")
    left, noted = set(INVOICES), 0
    while left:
        call = json.loads(chat.reply(sampling=only(read_invoice={"enum": sorted(left)})).text)
        supplier = call["read_invoice"]
        left.remove(supplier)
        chat.add("tool", read_invoice(supplier), name="read_invoice")
        note = json.loads(chat.reply(sampling=only(supplier={"const": supplier}, euros={"type": "integer"})).text)
        noted += note["euros"]
        print(call, "->", note)
    for receipt in session.history:
        if receipt.verb == "mask":
            print(f"cleared {session.text(list(receipt.ranges)).splitlines()[0]!r}: {receipt}")
    stats = session.stats
    print(f"Noted {noted} euros; the invoices come to {sum(map(total, INVOICES))}.")
    print(f"{stats.visible} tokens in view, {stats.masked} cleared, read again: {stats.reread + chat.num_reread}")
