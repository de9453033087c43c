"""WireGuard's files: keys that belong together, addresses, permissions, and every refusal."""

from __future__ import annotations

import base64
import ipaddress
import os
import stat
from itertools import combinations
from pathlib import Path

import pytest
import typer
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from asyncmesh.cli import mesh
from asyncmesh.cli import wireguard as module
from asyncmesh.cli.wireguard import KeyPair, add_to, wireguard
from asyncmesh.errors import ConfigError

Section = dict[str, str]
HOSTS = ["a=203.0.113.1", "b=b.example.org:5000", "c=[2001:db8::3]", "d", "e="]
BEHIND_NAT = ["d", "e"]


class File:
    """One parsed wg-quick file: its interface, and its peers in their order."""

    def __init__(self, path: Path) -> None:
        sections: list[tuple[str, Section]] = []
        for line in path.read_text().splitlines():
            if not line or line.startswith("#"):
                continue
            if line.startswith("["):
                sections.append((line, {}))
                continue
            name, _, value = line.partition(" = ")
            assert name not in sections[-1][1]
            sections[-1][1][name] = value
        assert [name for name, _ in sections] == ["[Interface]"] + ["[Peer]"] * (len(sections) - 1)
        self.interface, *self.peers = [section for _, section in sections]
        self.address = self.interface["Address"]

    @property
    def public_key(self) -> str:
        """Computed from the private one."""
        private = base64.b64decode(self.interface["PrivateKey"], validate=True)
        public = X25519PrivateKey.from_private_bytes(private).public_key()
        return base64.b64encode(public.public_bytes_raw()).decode()

    def peer(self, public_key: str) -> Section:
        (found,) = [peer for peer in self.peers if peer["PublicKey"] == public_key]
        return found


def written(folder: Path, hosts: list[str]) -> dict[str, File]:
    names = [text.partition("=")[0] for text in hosts]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    return {name: File(folder / name / "asyncmesh.conf") for name in names}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, File]:
    wireguard(HOSTS, output=tmp_path / "out")
    return written(tmp_path / "out", HOSTS)


def test_every_pair_has_each_others_public_key_and_one_secret_of_its_own(
    files: dict[str, File],
) -> None:
    secrets = []
    for one, other in combinations(files.values(), 2):
        secret = one.peer(other.public_key)["PresharedKey"]
        assert other.peer(one.public_key)["PresharedKey"] == secret
        assert len(base64.b64decode(secret, validate=True)) == 32
        secrets.append(secret)
    privates = [file.interface["PrivateKey"] for file in files.values()]
    assert len(set(secrets + privates)) == len(secrets) + len(privates) == 10 + 5
    assert all(len(file.peers) == len(files) - 1 for file in files.values())


def test_addresses_are_in_the_order_given_and_a_peer_has_only_its_own(
    files: dict[str, File],
) -> None:
    addresses = [file.address for file in files.values()]
    assert addresses == [f"10.77.0.{number}/32" for number in range(1, 6)]
    for one, other in combinations(files.values(), 2):
        assert one.peer(other.public_key)["AllowedIPs"] == other.address
        assert other.peer(one.public_key)["AllowedIPs"] == one.address


def test_endpoints_and_ports(files: dict[str, File]) -> None:
    endpoints = {
        "a": "203.0.113.1:51820",
        "b": "b.example.org:5000",
        "c": "[2001:db8::3]:51820",
    }
    ports = {"a": "51820", "b": "5000", "c": "51820"}
    for name, file in files.items():
        assert file.interface.get("ListenPort") == ports.get(name)
        assert set(file.interface) <= {"PrivateKey", "Address", "ListenPort"}  # no MTU
        for other, peer in ((o, file.peer(f.public_key)) for o, f in files.items() if o != name):
            assert peer.get("Endpoint") == endpoints.get(other)
            assert peer["PersistentKeepalive"] == "25"


def test_another_network_and_port(tmp_path: Path) -> None:
    hosts = ["a=203.0.113.1", "b=203.0.113.2:4"]
    wireguard(hosts, network="192.168.7.8/30", port=123, output=tmp_path / "out")
    a, b = written(tmp_path / "out", hosts).values()
    assert (a.address, b.address) == ("192.168.7.9/32", "192.168.7.10/32")
    assert (a.peers[0]["Endpoint"], b.peers[0]["Endpoint"]) == ("203.0.113.2:4", "203.0.113.1:123")
    assert (a.interface["ListenPort"], b.interface["ListenPort"]) == ("123", "4")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_can_read_what_is_written(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        wireguard(HOSTS, output=tmp_path / "deep" / "out")
    finally:
        os.umask(before)
    paths = list((tmp_path / "deep" / "out").rglob("*"))
    assert len(paths) == 2 * len(HOSTS)
    for path in (tmp_path / "deep" / "out", *paths):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_keys_are_new_every_time(tmp_path: Path) -> None:
    wireguard(HOSTS, output=tmp_path / "1")
    wireguard(HOSTS, output=tmp_path / "2")
    one, two = (written(tmp_path / name, HOSTS) for name in ("1", "2"))
    assert all(one[name].public_key != two[name].public_key for name in one)


def test_a_key_pair_does_not_show_its_secret() -> None:
    assert "hidden" not in repr(KeyPair(private="hidden", public="shown"))


def test_what_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wireguard(["n", *HOSTS], output=tmp_path / "out")
    told = capsys.readouterr().out
    lines = told.splitlines()
    assert lines[0] == "n: 10.77.0.1, behind NAT"
    assert lines[1] == "a: 10.77.0.2, reached at UDP 203.0.113.1:51820"
    assert [line for line in lines if line.startswith("n and d and e cannot reach each other")]
    # The coordinator is on a host that all others can reach.
    assert "on a:" in told
    commands = [line.strip() for line in lines if line.startswith("    ")]
    assert commands == [
        "install -m 600 asyncmesh.conf /etc/wireguard/asyncmesh.conf",
        "wg-quick up asyncmesh",
        "asyncmesh coordinator --bind 10.77.0.2",
        "asyncmesh join --coordinator 10.77.0.2:7400 --replica R",
    ]
    for file in written(tmp_path / "out", ["n", *HOSTS]).values():
        assert file.interface["PrivateKey"] not in told


def test_one_host_behind_nat_can_reach_everyone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wireguard(HOSTS[:4], output=tmp_path / "out")
    assert "cannot reach" not in capsys.readouterr().out


def test_the_coordinators_port_is_its_default() -> None:
    assert module._COORDINATOR_PORT == mesh._PORT


A, B = "a=203.0.113.1", "b=203.0.113.2"
MISTAKES: list[tuple[list[str], str, str]] = [
    ([A], "10.77.0.0/24", 'NAME = "a": is one host'),
    (["a", "b="], "10.77.0.0/24", 'ENDPOINT = "": no host has one'),
    ([A, "a=203.0.113.2"], "10.77.0.0/24", 'NAME = "a": is given twice'),
    ([A, "A=203.0.113.2"], "10.77.0.0/24", 'NAME = "A": is given twice (also as a)'),
    ([A, "b=203.0.113.1"], "10.77.0.0/24", "ENDPOINT of b"),
    (["h=h.org", "b=H.ORG:51820"], "10.77.0.0/24", "is h's too"),
    ([A, "=203.0.113.2"], "10.77.0.0/24", 'NAME = ""'),
    ([A, "b/c=203.0.113.2"], "10.77.0.0/24", 'NAME = "b/c"'),
    ([A, "..=203.0.113.2"], "10.77.0.0/24", 'NAME = ".."'),
    ([A, "b c=203.0.113.2"], "10.77.0.0/24", 'NAME = "b c"'),
    ([A, "-b=203.0.113.2"], "10.77.0.0/24", 'NAME = "-b"'),
    ([A, "\u017f=203.0.113.2"], "10.77.0.0/24", "must be letters, digits and inner hyphens"),
    ([A, f"{'b' * 64}=203.0.113.2"], "10.77.0.0/24", "63 at most"),
    ([A, "b=203.0.113.2:0"], "10.77.0.0/24", "the port must be from 1 to 65535"),
    ([A, "b=203.0.113.2:65536"], "10.77.0.0/24", "the port must be from 1 to 65535"),
    ([A, "b=203.0.113.2:x"], "10.77.0.0/24", 'ENDPOINT of b = "203.0.113.2:x": must be an'),
    ([A, "b=203.0.113.2:"], "10.77.0.0/24", "must be an address"),
    ([A, "b=203.0.113.2:\u0661"], "10.77.0.0/24", "must be an address"),
    ([A, "b=203.0.113"], "10.77.0.0/24", "must be an address"),
    ([A, "b=203.0.113.256"], "10.77.0.0/24", "must be an address"),
    ([A, "b=b=c"], "10.77.0.0/24", "must be an address"),
    ([A, "b=a host"], "10.77.0.0/24", "must be an address"),
    ([A, "b=2001:db8::2"], "10.77.0.0/24", "[IPv6 address]"),
    ([A, "b=[2001:db8::g]"], "10.77.0.0/24", "[IPv6 address]"),
    ([A, "b=[203.0.113.2]"], "10.77.0.0/24", "[IPv6 address]"),
    ([A, "b=0.0.0.0"], "10.77.0.0/24", "at which others reach it"),
    ([A, "b=127.0.0.1"], "10.77.0.0/24", "at which others reach it"),
    ([A, "b=[::1]:5"], "10.77.0.0/24", "at which others reach it"),
    ([A, "b=224.0.0.1"], "10.77.0.0/24", "at which others reach it"),
    ([A, "b=10.77.0.2"], "10.77.0.0/24", "is within --network 10.77.0.0/24"),
    ([A, B], "10.77.0.1/24", '--network = "10.77.0.1/24": must be an IPv4 network'),
    ([A, B], "net", '--network = "net": must be an IPv4 network'),
    ([A, B], "fd00::/64", '--network = "fd00::/64": must be an IPv4 network'),
    ([A, B], "8.8.8.0/24", '--network = "8.8.8.0/24": must be a private network'),
    ([A, B], "0.0.0.0/0", "must be a private network"),
    ([A, B], "10.77.0.0", "has room for 1 of 2 hosts; try --network 10.77.0.0/30"),
    ([A, B, "c"], "10.77.0.0/30", "has room for 2 of 3 hosts; try --network 10.77.0.0/29"),
]


@pytest.mark.parametrize(("hosts", "network", "told"), MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    hosts: list[str], network: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        wireguard(hosts, network=network, output=tmp_path / "out")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.rule
    assert caught.value.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["b\n=203.0.113.2", "b=203.0.113.2\nPostUp = true", "b=x\n"])
def test_nothing_can_be_slipped_into_a_file(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        wireguard([A, host], output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [2, 3, 6, 7, 14, 15])
def test_the_network_that_is_proposed_is_the_smallest_that_suffices(
    count: int, tmp_path: Path
) -> None:
    hosts = [f"h{number}=203.0.113.{number + 1}" for number in range(count)]
    with pytest.raises(ConfigError) as caught:
        wireguard(hosts, network="10.77.0.0/32", output=tmp_path / "out")
    proposed = ipaddress.IPv4Network(caught.value.fix.removeprefix("try --network "))
    assert proposed.num_addresses // 2 - 2 < count <= proposed.num_addresses - 2
    wireguard(hosts, network=str(proposed), output=tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == count


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    wireguard([A, B], output=tmp_path)  # a folder may exist that is empty
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.conf")}
    with pytest.raises(ConfigError, match="keys are never overwritten"):
        wireguard([A, B], output=tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.conf")} == before
    with pytest.raises(ConfigError, match="already exists"):
        wireguard([A, B], output=tmp_path / "a" / "asyncmesh.conf")


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for output in (tmp_path / "file" / "out", tmp_path / "link", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match="choose a folder that can be written to") as caught:
            wireguard([A, B], output=output)
        assert "\n" not in str(caught.value)


def test_as_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    add_to(app)
    app([A, "d", "--port=99"], standalone_mode=False)
    a, d = written(tmp_path / "wireguard", [A, "d"]).values()
    assert d.peers[0]["Endpoint"] == "203.0.113.1:99"
    assert "Endpoint" not in a.peers[0]
    with pytest.raises(ConfigError, match="--output"):
        app([A, "d"], standalone_mode=False)
