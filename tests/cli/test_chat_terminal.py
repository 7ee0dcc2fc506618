"""``edgekv chat`` in a real terminal: tmux sends keys, and the screen is read."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TinyPath = Callable[..., Path]
pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
PATIENCE_S = 300


class Window:
    """A terminal of that size with a command in it; nobody's own state is touched."""

    def __init__(self, folder: Path, command: list[str], width: int = 80, height: int = 30) -> None:
        self._socket = str(folder / "tmux")
        env = {
            "HOME": folder,
            "XDG_STATE_HOME": folder / "state",
            "LANG": "C.UTF-8",
            "PYTHONPATH": os.environ["PYTHONPATH"],
        }
        named = [f"{name}={value}" for name, value in env.items()]
        line = f"env {shlex.join(named)} {shlex.join(command)}; echo ended $?; sleep 600"
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height), line)
        self._tmux("set-option", "-g", "history-limit", "10000")

    def _tmux(self, *args: str, stdin: str | None = None) -> str:
        command = ["tmux", "-u", "-S", self._socket, *args]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True, timeout=300).stdout

    def keys(self, *keys: str) -> None:
        """Names of keys, such as Enter, C-c and M-Enter."""
        self._tmux("send-keys", *keys)

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)

    def enter(self, text: str) -> None:
        self.type(text)
        self.keys("Enter")

    def paste(self, text: str) -> None:
        """As a terminal does: bracketed, all at once."""
        self._tmux("load-buffer", "-", stdin=text)
        self._tmux("paste-buffer", "-p")

    def text(self, *, colours: bool = False, all_of_it: bool = False) -> str:
        return self._tmux("capture-pane", "-p", *(["-e"] if colours else []), *(["-S", "-"] if all_of_it else []))

    def until(self, wanted: str, times: int = 1) -> str:
        """The screen, once that stands on it so often."""
        deadline = time.monotonic() + PATIENCE_S
        while (seen := self.text(all_of_it=True)).count(wanted) < times:
            assert time.monotonic() < deadline, f"{wanted!r} did not come:\n{seen}"
            time.sleep(0.05)
        return seen

    def close(self) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True, check=False)


Open = Callable[..., Window]


@pytest.fixture
def chat(tmp_path: Path, tiny_path: TinyPath) -> Iterator[Open]:
    """``chat("--n-ctx", 512, width=40)``: a window in which the chat waits for its first line."""
    opened: list[Window] = []

    def start(*args: object, width: int = 80, height: int = 30, model: Path | None = None) -> Window:
        command = [sys.executable, "-m", "edgekv", "chat", str(model or tiny_path()), "--threads", "1", *map(str, args)]
        opened.append(Window(tmp_path, command, width, height))
        opened[-1].until("cells ·")
        opened[-1].until("\n>")
        return opened[-1]

    yield start
    for window in opened:
        window.close()


QUIET = ("--n-ctx", 512, "--max-tokens", 8, "--temperature", 0)


def test_a_conversation(chat: Open) -> None:
    window = chat(*QUIET)
    window.enter("Hello!")
    window.until("read again: 0")
    window.enter("And on?")
    seen = window.until("read again: 0", times=2)
    assert "> Hello!" in seen and "> And on?" in seen
    assert "visible" in window.until("visible").splitlines()[-1]  # the status line
    window.keys("C-d")
    window.until("ended 0")


def test_korean_and_emoji(chat: Open) -> None:
    window = chat(*QUIET)
    window.enter("안녕하세요? 😀 반갑습니다")
    window.until("read again: 0")
    window.enter("/spans")
    assert "안녕하세요? 😀 반갑습니다" in window.until("assistant-2").split("/spans")[1]


def test_several_lines(chat: Open) -> None:
    window = chat(*QUIET)
    window.type("first")
    window.keys("M-Enter")
    window.type("second")
    window.keys("Enter")
    window.until("read again: 0")
    window.enter("/spans")
    assert "first second" in window.until("assistant-2")


def test_history_and_completion(chat: Open) -> None:
    window = chat(*QUIET)
    window.enter("Say something.")
    window.until("read again: 0")
    window.keys("Up")
    window.until("> Say something.", times=2)
    window.keys("C-c")
    window.type("/mas")
    window.keys("Tab")
    window.until("> /mask")
    window.type(" us")
    window.keys("Tab")
    window.until("/mask user-1")
    window.keys("Enter")
    assert "masked" in window.until("gap closed")


def test_no_line_is_broken_in_a_narrow_window(chat: Open) -> None:
    """Tables and the map fit, word by word; nothing is cut off in the middle of a span's name."""
    width = 40
    window = chat(*QUIET, width=width)
    for message in ("One.", "Two.", "Three."):
        window.enter(message)
    window.until("read again: 0", times=3)
    for command in ("/spans", "/map", "/stats", "/set"):
        window.enter(command)
    seen = window.until("spill")
    assert "assistant-6" in seen and "free" in seen
    assert all(len(line) <= width for line in seen.splitlines())


def test_the_map_is_in_colour(chat: Open) -> None:
    window = chat(*QUIET)
    window.enter("Hello!")
    window.until("read again: 0")
    window.enter("/map")
    window.until("free")
    drawn = window.text(colours=True)
    assert "\x1b[36m" in drawn and "\x1b[32m" in drawn  # cyan, a user's; green, the model's


def test_a_paste_of_5000_lines_is_one_message(chat: Open) -> None:
    window = chat("--n-ctx", 512, "--max-tokens", 8)
    window.enter("Hello!")
    window.until("read again: 0")
    window.paste("\n".join(f"line {n}" for n in range(5000)))
    window.until("line 4999")
    window.keys("Enter")
    window.until("error: ")
    window.enter("/stats")
    assert "turns           2" in window.until("not read again")
    window.enter("Still there?")
    window.until("read again: 0", times=2)


def test_ctrl_c_at_any_moment(chat: Open) -> None:
    """Before an answer, in it and after it: the chat goes on, and what stands in it is whole."""
    window = chat("--n-ctx", 2048, "--max-tokens", 600, "--temperature", 1)
    for number in range(3):  # at once, wherever it is then
        window.enter(f"Message {number}, which is answered at length.")
        window.until(f"Message {number},")
        window.keys("C-c")
    window.keys("C-c", "C-u")
    window.enter("/stats")
    window.until("not read again")
    window.enter("/set max_tokens 5")
    window.until("max_tokens")
    window.enter("The last one.")
    window.until("5 tokens ·")
    window.keys("C-c")
    window.enter("/exit")
    window.until("ended 0")


def test_ctrl_c_twice_ends(chat: Open) -> None:
    window = chat(*QUIET)
    window.keys("C-c")
    window.until("Ctrl-C again")
    window.keys("C-c")
    window.until("ended 0")


def test_branches_show_in_the_prompt(chat: Open) -> None:
    window = chat(*QUIET)
    window.enter("Hello!")
    window.until("read again: 0")
    window.enter("/fork")
    window.until("fork 1>")
    window.enter("/back")
    window.until("back where the fork began")
    window.enter("/exit")
    window.until("ended 0")
