"""A user without a home folder, as services and containers have them: only what needs a folder asks for one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import ROOT

TinyPath = Callable[..., Path]

#: Imports come first: another user may not read where Python is.
NO_HOME = """
import email.parser, encodings.cp437, importlib, os, pkgutil, pwd, sys
import edgekv, edgekv.cli, platformdirs, platformdirs.unix, psutil, llama_cpp
for module in pkgutil.walk_packages(edgekv.__path__, "edgekv."):
    if "termin" not in module.name and "__main__" not in module.name:
        importlib.import_module(module.name)
os.environ.pop("HOME", None)
if sys.argv[1] == "another user":
    os.setuid(54321)
else:
    def nobody(uid):
        raise KeyError(uid)
    pwd.getpwuid = nobody
from pathlib import Path
from edgekv import Chat, Model, Session, Settings, catalog, doctor, errors
catalog._clone = lambda: None  # as it is where edgekv was installed
path, folder = sys.argv[2:]
one = Settings(n_ctx=256, n_threads=1)
"""

SESSION = """
with Session(path, settings=one) as session:
    session.append("The pump at the north gate", name="a")
    session.mask("a", force=True)
    session.unmask("a")
    session.park("a", force=True)
    session.unmask("a")
    assert session.generate(2).finish().text is not None
    session.save(folder + "/s.kvs")
Session.load(folder + "/s.kvs", settings=one).close()
with Session(path, settings=Settings(n_ctx=256, n_threads=1, kv_type="q8_0")) as session:
    session.append("The pump")
os.environ["EDGEKV_MODELS"] = folder
assert catalog.models_dir() == Path(folder)
try:
    Model("smollm2")
except errors.ModelNotFound as err:
    assert "edgekv models fetch smollm2" in str(err), err
"""

ERRORS = """
def refused(error, says, call):
    try:
        call()
    except error as err:
        assert says in str(err), err
    else:
        raise AssertionError(says)

refused(errors.FileError, "EDGEKV_MODELS", lambda: Model("smollm2"))
refused(errors.FileError, "EDGEKV_MODELS", catalog.models_dir)
refused(errors.ModelNotFound, "no model file", lambda: Model(folder + "/gone.gguf"))
refused(errors.UsageError, "home folder", lambda: Model("~/m.gguf"))
refused(errors.UsageError, "home folder", lambda: Model("~nobody-of-that-name/m.gguf"))
with Session(path, settings=Settings(n_ctx=256, n_threads=1, max_parked_bytes=0)) as session:
    session.append("The pump at the north gate", name="a")
    before = session.states(session.span("a")), session.engine.cells_used
    refused(errors.FileError, "park_folder", lambda: session.park("a", force=True))
    assert before == (session.states(session.span("a")), session.engine.cells_used)
    session.audit()
    session.park("a", to=folder, force=True)
assert [m["path"] for m in doctor.machine.models()] == [None] * len(catalog.entries())
found = doctor.checks.carry_out(doctor.machine.CHECKS[1])
assert found.status == "warning" and "EDGEKV_MODELS" in found.message, found
os.environ["EDGEKV_MODELS"] = "~/models"
refused(errors.UsageError, "home folder", lambda: Model("smollm2"))
"""


@pytest.mark.parametrize("who", ["this user", "another user"])
@pytest.mark.parametrize("code", [SESSION, ERRORS], ids=["what needs none", "what needs one"])
def test_no_home(tiny_path: TinyPath, who: str, code: str) -> None:
    if who == "another user" and (not hasattr(os, "geteuid") or os.geteuid() != 0):
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as folder:  # below /tmp itself: pytest's folders are for their owner only
        os.chmod(folder, 0o777)
        model = Path(folder, "m.gguf")
        model.write_bytes(tiny_path("llama").read_bytes())
        model.chmod(0o644)
        manifest = Path(folder, "manifest.json")
        manifest.write_text((ROOT / "models" / "manifest.json").read_text())
        done = subprocess.run(
            [sys.executable, "-c", NO_HOME + code, who, str(model), folder],
            env={"PYTHONPATH": str(ROOT), "GGML_NO_BACKTRACE": "1", "EDGEKV_MANIFEST": str(manifest)},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-1500:]
