"""Test in a real kernel that clicks and a reloaded page reach the panel while a cell runs."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

SHOWN = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from live_sample import ROWS, Told
live = Told(Path({run!r}))
live.tell("step", *ROWS)
live.begin()
live.show()
sys.stdout.write(f"comm {{live._panel.stop.comm.comm_id}}\\n")
"""
CELL = f"""{SHOWN}
import time
end = time.monotonic() + 100
while not live.writers[0].stop_asked() and time.monotonic() < end:
    time.sleep(0.05)  # the kernel's main thread is busy, as in cluster.run
print("asked" if live.writers[0].stop_asked() else "not asked", flush=True)
live.over.set()
live.result()
"""


@pytest.fixture
def client(own_folders: Path) -> Any:
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import KernelManager

    manager = KernelManager(
        kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[])
    )
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def subshell(client: Any) -> str:
    """Create a subshell, as JupyterLab does before it sends widget messages; return its ID."""
    client.control_channel.send(client.session.msg("create_subshell_request", {}))
    while (reply := client.get_control_msg(timeout=120))["msg_type"] != "create_subshell_reply":
        pass
    return str(reply["content"]["subshell_id"])


def click(client: Any, comm: str, shell: str) -> None:
    data = {"method": "custom", "content": {"event": "click"}}
    message = client.session.msg("comm_msg", {"comm_id": comm, "data": data})
    message["header"]["subshell_id"] = shell
    client.shell_channel.send(message)


def test_a_click_stops_while_the_cell_runs(client: Any, tmp_path: Path) -> None:
    cell = CELL.format(tests=str(Path(__file__).parent), run=str(tmp_path))
    shell = subshell(client)
    request = client.execute(cell)
    said, types, views = "", set(), []
    end = time.monotonic() + 120
    while time.monotonic() < end:
        message = client.get_iopub_msg(timeout=120)
        types.add(message["msg_type"])
        content = message["content"]
        if message["msg_type"] == "error":
            pytest.fail("\n".join(content["traceback"]))
        if message["msg_type"] == "display_data":
            views.append(content["data"])
        if message["msg_type"] == "stream":
            said += content["text"]
            if content["text"].startswith("comm "):
                click(client, content["text"].split()[1], shell)
        own = message["parent_header"].get("msg_id") == request
        if own and message["msg_type"] == "status" and content["execution_state"] == "idle":
            break
    assert "\nasked" in said
    (view,) = views
    assert "application/vnd.jupyter.widget-view+json" in view


WAITING = f"""{SHOWN}
import threading

def end():
    while not live.writers[0].stop_asked():
        live.over.wait(0.05)
    live.over.set()

threading.Thread(target=end, daemon=True).start()
live.result()
sys.stdout.write("over\\n")
"""


def send(client: Any, kind: str, **content: Any) -> Any:
    """Send a message without a subshell, as a page without one does; return the message's ID."""
    message = client.session.msg(kind, content)
    client.shell_channel.send(message)
    return message["header"]["msg_id"]


def ask(client: Any, kind: str, **content: Any) -> Any:
    """Return the answer's content; repeat the request, which is queued until the cell waits."""
    asked = set()
    for _ in range(24):
        asked.add(send(client, kind, **content))
        with suppress(Empty):
            while True:  # requests from the kernel's start are answered first
                message = client.get_shell_msg(timeout=5)
                if message["parent_header"]["msg_id"] in asked:
                    return message["content"]
    pytest.fail(f"no answer to {kind} while the cell waits")


def wait_for(client: Any, *kinds: str) -> dict[str, Any]:
    """Return the content of the next message of these kinds to all pages, except echoed updates."""
    while True:
        message = client.get_iopub_msg(timeout=120)
        assert message["msg_type"] != "error", message["content"]["traceback"]
        content: dict[str, Any] = message["content"]
        if message["msg_type"] in kinds and content.get("data", {}).get("method") != "echo_update":
            return content


def test_a_page_that_is_loaded_anew_finds_the_panel_of_a_cell_that_waits(
    client: Any, tmp_path: Path
) -> None:
    client.execute(WAITING.format(tests=str(Path(__file__).parent), run=str(tmp_path)))
    button = wait_for(client, "stream")["text"].split()[1]
    assert ask(client, "kernel_info_request")["implementation"] == "ipython"
    comms = ask(client, "comm_info_request", target_name="jupyter.widget")["comms"]
    assert button in comms
    control = {"target_name": "jupyter.widget.control", "data": {}}
    message = client.session.msg("comm_open", {"comm_id": "page"} | control)
    client.shell_channel.send(message | {"metadata": {"version": "1.0.0"}})
    send(client, "comm_msg", comm_id="page", data={"method": "request_states"})
    while (states := wait_for(client, "comm_msg"))["comm_id"] != "page":
        pass
    assert states["data"]["states"][button]["state"]["description"] == "Stop training"
    click = {"method": "custom", "content": {"event": "click"}}
    send(client, "comm_msg", comm_id=button, data=click)
    assert wait_for(client, "stream")["text"] == "over\n"
