"""Test that names of users and hosts are masked, but not equal words with another meaning."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Iterator

import pytest

from labkit.common import privacy
from labkit.common.privacy import scrub

LOGINS = ["adam", "run", "a", "model", "alice", "sgd", "data", "loss"]
HOSTS = ["node", "gpu", "ring", "bluebox"]
# In these texts, U stands for the user name and H for the host name.
MASKED = {
    "/home/U/lab/x.py": "~/lab/x.py",
    "/Users/U": "~",
    'File "/export/home/U/lab/train.py", line 3, in fit': 'File "…/train.py", line 3, in fit',
    "/export/home/U": "…/…",
    "in /srv/U: no space": "in …/…: no space",
    "../home/U/data": "../home/…/data",
    r"C:\Users\U\lab": r"C:\Users\…\lab",
    "~U/data": "~…/data",
    "U@H": "…@…",
    "U@login.example.org": "…@login.example.org",
    "ssh U@H:/x": "ssh …@…:/x",
    "USER=U LOGNAME=U": "USER=… LOGNAME=…",
    "SUDO_USER='U'": "SUDO_USER='…'",
    "{'USER': 'U', 'HOME': '/home/U'}": "{'USER': '…', 'HOME': '~'}",
    '{"user": "U", "hostname": "H"}': '{"user": "…", "hostname": "…"}',
    r'"{\"user\": \"U\"}"': r'"{\"user\": \"…\"}"',
    "&#x27;USER&#x27;: &#x27;U&#x27;": "&#x27;USER&#x27;: &#x27;…&#x27;",
    "username: U, owner=U": "username: …, owner=…",
    "no such user 'U'": "no such user '…'",
    "uid=1000(U) gid=1000(U) groups=4(adm)": "uid=1000(…) gid=1000(…) groups=4(adm)",
    "drwxr-xr-x 2 U U 4096 Nov 27 13:14 runs": "drwxr-xr-x 2 … … 4096 Nov 27 13:14 runs",
    "-rw-r--r--. 1 U staff 12 Nov 27 x": "-rw-r--r--. 1 … staff 12 Nov 27 x",
    "U  4321  0.0  0.1 10 20 pts/0 S 13:14 0:00 python": (
        "…  4321  0.0  0.1 10 20 pts/0 S 13:14 0:00 python"
    ),
    "HOSTNAME=H": "HOSTNAME=…",
    "tcp://H:5555 is not heard": "tcp://…:5555 is not heard",
    "host 'H' does not answer": "host '…' does not answer",
}
# Texts that a result may contain unmasked.
KEPT = [
    "optimizer U",
    "U",
    "optimizer=U",
    "{'optimizer': 'U', 'epochs': 2}",
    '"optimizer": "U"',
    "U/dense/kernel",
    "strategy U on network H",
    "<td>U</td><td>H</td>",
    "the user gives a U, which the host has",
    "U: 0.93, H: 0.91",
    "lk.Experiment(optimizer='U', name='H')",
    "device:H:0",
    "U  2  0.93",
    "models/U.keras",
]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    yield monkeypatch
    monkeypatch.undo()
    privacy._names.cache_clear()


def _called(names: pytest.MonkeyPatch, user: str, host: str) -> None:
    names.setattr(getpass, "getuser", lambda: user)
    names.setattr(socket, "gethostname", lambda: host)
    privacy._names.cache_clear()


def _filled(text: str, user: str, host: str) -> str:
    return re.sub(r"\bH\b", host, re.sub(r"\bU\b", user, text))


@pytest.mark.parametrize("user", LOGINS)
def test_a_word_that_is_a_name_too_stays_where_it_is_a_word(
    names: pytest.MonkeyPatch, user: str
) -> None:
    for host in HOSTS:
        _called(names, user, host)
        for text in KEPT:
            assert scrub(_filled(text, user, host)) == _filled(text, user, host)


@pytest.mark.parametrize("user", LOGINS)
def test_a_name_is_masked_where_it_stands_as_such(names: pytest.MonkeyPatch, user: str) -> None:
    for host in HOSTS:
        _called(names, user, host)
        for text, masked in MASKED.items():
            assert scrub(_filled(text, user, host)) == masked, (user, host)


def test_names_that_are_no_words_are_masked_everywhere(names: pytest.MonkeyPatch) -> None:
    _called(names, "jdoe4217", "node-17.lab.example")
    said = "jdoe4217 trains on node-17.lab.example, node-17 and node-171"
    assert scrub(said) == "… trains on …, … and node-171"


def test_root_and_localhost_tell_nothing(names: pytest.MonkeyPatch) -> None:
    _called(names, "root", "localhost")
    for text in ("USER=root", "root@localhost", "the root of a tree"):
        assert scrub(text) == text
