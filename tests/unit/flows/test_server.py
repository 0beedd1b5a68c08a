"""The server process: who it belongs to, where it keeps its data, how it ends."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import urllib.request
from pathlib import Path

import psutil
import pytest

from flows import server as module
from flows.server import OwnServer, ServerError, client_environment, configured_api_url
from slime_core.waits import poll


@pytest.fixture(autouse=True)
def no_prefect_environment(monkeypatch, tmp_path):
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "users"))


def profile(tmp_path: Path, text: str) -> None:
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "profiles.toml").write_text(text)


def test_the_environment_chooses_the_api(monkeypatch, tmp_path):
    profile(tmp_path, 'active = "a"\n[profiles.a]\nPREFECT_API_URL = "http://profile/api"\n')
    assert configured_api_url()[0] == "http://profile/api"
    monkeypatch.setenv("PREFECT_API_URL", "http://environment/api")
    assert configured_api_url() == ("http://environment/api", "PREFECT_API_URL")


@pytest.mark.parametrize(
    "text", ["", 'active = "a"\n', 'active = "a"\n[profiles.a]\n', "[profiles.b]\n"]
)
def test_a_profile_without_an_api_means_our_own_server(tmp_path, text):
    profile(tmp_path, text)
    assert configured_api_url() is None


def test_no_profile_means_our_own_server():
    assert configured_api_url() is None


def test_a_broken_profile_is_named(tmp_path):
    profile(tmp_path, "active = [")
    with pytest.raises(ServerError, match=r"profiles.toml: is not valid TOML"):
        configured_api_url()


def test_the_users_patience_counts(monkeypatch):
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "9")
    found = client_environment("http://127.0.0.1:1/api", None)
    assert found["PREFECT_CLIENT_MAX_RETRIES"] == "9"
    assert "PREFECT_HOME" not in found


def test_it_starts_in_the_main_thread_only(tmp_path):
    """Its death signal comes when the thread that started it ends."""
    errors: list[Exception] = []

    def start():
        try:
            OwnServer.start(tmp_path)
        except ServerError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "main thread" in str(errors[0])


def test_a_taken_port_is_named_and_ours_moves_aside(tmp_path):
    with module._listener(0, tmp_path) as first:
        port = first.getsockname()[1]
        first.listen()
        with pytest.raises(ServerError, match=f"port {port} on 127.0.0.1 is in use"):
            module._listener(port, tmp_path)
        with module._listener(0, tmp_path) as second:
            assert second.getsockname()[1] != port
            kept = second.getsockname()[1]
    with module._listener(0, tmp_path) as third:
        assert third.getsockname()[1] == kept


@pytest.mark.slow
def test_a_server_that_cannot_start_quotes_its_log(tmp_path):
    home = tmp_path / "prefect"
    home.mkdir()
    (home / "prefect.db").mkdir()
    own = OwnServer.start(tmp_path)
    try:
        with pytest.raises(ServerError, match=r"server.log:\n(.|\n)*database"):
            own.wait_healthy(240)
    finally:
        own.stop()


def test_it_serves_from_the_workspace_and_dies_with_its_parent(tmp_path):
    script = f"""
        import sys, time
        from pathlib import Path
        from flows.server import OwnServer
        own = OwnServer.start(Path({str(tmp_path)!r}))
        own.wait_healthy(240)
        print(own.process.pid, own.url, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    try:
        pid, url = parent.stdout.readline().split()
        with urllib.request.urlopen(url) as page:
            assert page.status == 200 and b"<html" in page.read()
        with urllib.request.urlopen(f"{url.rstrip('/')}/ui-settings") as settings:
            assert json.load(settings)["api_url"] == f"{url.rstrip('/')}/api"
        assert (tmp_path / "prefect" / "prefect.db").is_file()
        assert not (tmp_path / ".prefect").exists() and not (tmp_path / "users").exists()
        child = psutil.Process(int(pid))
        assert {c.laddr.ip for c in child.net_connections() if c.status == "LISTEN"} == {
            "127.0.0.1"
        }
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
    poll("the server to end", 10, lambda: not child.is_running() or None)
