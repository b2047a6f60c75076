import socket

import pytest

from tests.hub.local_hub import Client, LocalHub, own


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """A Hub on this machine."""
    with LocalHub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture(scope="session")
def client(hub, tmp_path_factory):
    """A process with the real client of that Hub."""
    client = Client(hub, tmp_path_factory.mktemp("home") / "client")
    yield client
    client.close()


@pytest.fixture
def repo(request, hub):
    """A repository's name of its own for each test; no fault and no request is left over from another one."""
    hub.faults.clear()
    hub.requests.clear()
    return f"me/{request.node.originalname.replace('_', '-')}-{own(request.node.name)}"
