"""Every error edgekv raises on purpose.

    EdgekvError
    ├── UsageError(ValueError)      the caller's mistake; nothing was touched
    │   ├── UnknownSpan             a name, tag, role or range that selects nothing
    │   ├── PinnedTokens            masking attention sinks without force=True
    │   ├── BadState                the verb does not fit the tokens' state (unmask of a visible span, ...)
    │   ├── GrammarError            a grammar or JSON schema llama.cpp cannot read
    │   └── ClosedError             use after close()
    ├── ModelError                  the file cannot serve
    │   ├── ModelNotFound           no such name or path; the message names what is near, or the fetch command
    │   ├── NotGGUF                 another kind of file
    │   ├── DamagedModel            truncated, or refused by llama.cpp
    │   ├── NotGenerative           vocabulary only, an encoder, an adapter, ...: there is no memory to mask
    │   ├── TooLarge                model or cache would not fit in the RAM that is free here
    │   ├── TemplateError           the chat template cannot be read, or cannot render this conversation
    │   └── FetchFailed             download failed or its checksum is wrong; no file was left behind
    ├── FileError                   a session file, KV module or parked span cannot be written or read; nothing changed
    │   ├── NotEdgekvFile           another kind of file, or none
    │   ├── DamagedFile             truncated or changed: its checksum is wrong
    │   └── WrongFile               of another model, KV type, RoPE setting, ..., or of a newer edgekv
    ├── MaskUnsupported             this model's memory cannot do it (recurrent, hybrid, no shift); nothing was touched
    ├── ContextFull                 no free cell; the session is as it was
    ├── NoLogits                    nothing to sample from: the session is empty
    ├── GrammarStuck                no token continues the grammar; what was generated stays
    ├── DecodeFailed                llama.cpp failed inside a decode; the session was rolled back
    ├── Stopped                     stop() ended the evaluation; the session is as it was before the call
    ├── SessionBroken               an edit failed half way; the message says how to go on
    ├── ChatBroken                  the session does not hold what the chat template rendered
    └── AuditFailed                 llama.cpp does not hold what the ledger says

``UsageError`` is also a ``ValueError``, so callers who do not know edgekv catch it the usual way.
"""

from __future__ import annotations


class EdgekvError(Exception):
    """Root of the tree; the message is one sentence a user can act on."""


class UsageError(EdgekvError, ValueError):
    """The call does not make sense; nothing was touched."""


class UnknownSpan(UsageError):
    """A target that selects nothing."""


class PinnedTokens(UsageError):
    """The target holds attention sinks (BOS and the first tokens)."""


class BadState(UsageError):
    """The verb does not fit the state the tokens are in."""


class GrammarError(UsageError):
    """A grammar or JSON schema that llama.cpp cannot read."""


class ClosedError(UsageError):
    """The model, engine or session was closed."""


class ModelError(EdgekvError):
    """The model file cannot serve."""


class ModelNotFound(ModelError):
    """No such name in the manifest and no such file."""


class NotGGUF(ModelError):
    """The file is not a GGUF file."""


class DamagedModel(ModelError):
    """The file is truncated or llama.cpp refused it."""


class NotGenerative(ModelError):
    """Vocabulary only, an encoder, an adapter, a later part of a split model: there is no cache to mask."""


class TooLarge(ModelError):
    """The model or the cache would not fit in free RAM."""


class TemplateError(ModelError):
    """The chat template cannot be read, or cannot render this conversation."""


class FetchFailed(ModelError):
    """A download failed or its checksum is wrong."""


class FileError(EdgekvError):
    """A session file, a KV module or a parked span cannot be written or read."""


class NotEdgekvFile(FileError):
    """Neither a session file nor a KV module."""


class DamagedFile(FileError):
    """The file is truncated, or bytes of it were changed."""


class WrongFile(FileError):
    """The file is sound and does not fit: another model, other settings, a newer format."""


class MaskUnsupported(EdgekvError):
    """This model's memory cannot do what was asked."""


class ContextFull(EdgekvError):
    """No cell is free for the tokens that were to be read."""


class NoLogits(EdgekvError):
    """There is no distribution to sample from."""


class GrammarStuck(EdgekvError):
    """No token of the vocabulary continues the grammar."""


class DecodeFailed(EdgekvError):
    """llama.cpp reported a failure inside llama_decode."""


class Stopped(EdgekvError):
    """Session.stop() or Engine.stop() ended an evaluation."""


class SessionBroken(EdgekvError):
    """An edit failed half way through its native calls."""


class ChatBroken(EdgekvError):
    """A chat's session does not hold what its template rendered: some text would not reach the model, or twice."""


class AuditFailed(EdgekvError):
    """llama.cpp holds other cells than the ledger says."""
