"""`wireguard`: a private, encrypted network between the hosts of a mesh, one wg-quick file a host.

Owns these files and the secrets in them. Invariants: nothing is written before every argument is
known to be right; no key is ever overwritten; a file with a key is its owner's alone from the
moment it exists. Addresses are IPv4 because the mesh's are.
"""

from __future__ import annotations

import base64
import ipaddress
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from pathlib import Path
from typing import Annotated

import typer

from asyncmesh.errors import ConfigError

_INTERFACE = "asyncmesh"
_FILE = f"{_INTERFACE}.conf"
_NETWORK = "10.77.0.0/24"
_PORT = 51820  # WireGuard's usual one
_COORDINATOR_PORT = 7400  # where `asyncmesh coordinator` listens unless told otherwise
_KEEPALIVE_S = 25  # shorter than most routers remember a UDP connection
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f.]*:[0-9A-Fa-f.:]*\]|[^:\[\]]+)(?::([0-9]{1,9}))?")
# Any other network is somebody's on the internet, who could then not be reached any more.
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")


def add_to(app: typer.Typer) -> None:
    app.command()(wireguard)


def wireguard(
    hosts: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=ENDPOINT[:PORT]",
            help="The hosts, and where others reach each of them; NAME alone: behind NAT.",
            show_default=False,
        ),
    ],
    network: Annotated[
        str, typer.Option(help="The hosts get its addresses, in the order given.")
    ] = _NETWORK,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="UDP, of every host without a PORT.")
    ] = _PORT,
    output: Annotated[Path, typer.Option(help="A new folder, for keys.")] = Path("wireguard"),
) -> None:
    """Write the configuration of a WireGuard network of hosts, with new keys."""
    planned = plan(hosts, network, port)
    _require_new(output)
    _write(output, configurations(planned))
    print("\n".join(_what_next(planned, output)))


@dataclass(frozen=True)
class Host:
    """One host. `endpoint` (HOST:PORT) and `port` are None where nobody can reach it first."""

    name: str
    address: str
    endpoint: str | None
    port: int | None


# -- what is asked for ---------------------------------------------------------------------------
def plan(texts: Sequence[str], network: str, port: int) -> list[Host]:
    """The hosts of a command line with their addresses, or one line about what is wrong."""
    within = _private_network(network)
    parts = [text.partition("=") for text in texts]
    for name, _, _ in parts:
        _check_name(name)
    addresses = _addresses(within, len(parts))
    hosts = [
        Host(name, address, *_endpoint(name, endpoint, port, within))
        for (name, _, endpoint), address in zip(parts, addresses, strict=True)
    ]
    _check_together(hosts)
    return hosts


def _private_network(text: str) -> ipaddress.IPv4Network:
    try:
        network = ipaddress.IPv4Network(text)
        if any(network.subnet_of(ipaddress.IPv4Network(one)) for one in _PRIVATE):
            return network
        rule = f"must be a private network, within {', '.join(_PRIVATE)}"
    except ValueError:
        rule = "must be an IPv4 network as FIRST-ADDRESS/BITS"
    raise ConfigError("--network", text, rule, f"try --network {_NETWORK}")


def _check_name(name: str) -> None:
    """It names a folder and a host."""
    if not _LABEL.fullmatch(name):
        rule = "must be letters, digits and inner hyphens, 63 at most"
        raise ConfigError("NAME", name, rule, "write NAME=ENDPOINT, such as node-1=203.0.113.5")


def _addresses(network: ipaddress.IPv4Network, count: int) -> list[str]:
    addresses = [str(address) for address in islice(network.hosts(), count)]
    if len(addresses) < count:
        # Its first and its last address are no host's.
        enough = network.supernet(new_prefix=32 - (count + 1).bit_length())
        rule = f"has room for {len(addresses)} of {count} hosts"
        raise ConfigError("--network", str(network), rule, f"try --network {enough}")
    return addresses


def _endpoint(
    name: str, text: str, port: int, network: ipaddress.IPv4Network
) -> tuple[str | None, int | None]:
    """`ENDPOINT[:PORT]` as WireGuard wants it, and its port."""
    if not text:
        return None, None
    found = _ENDPOINT.fullmatch(text)
    host, number = (found[1], int(found[2] or port)) if found is not None else ("", port)
    address = _parsed(host)
    if not 0 < number < 2**16:
        rule = "the port must be from 1 to 65535"
    elif not (_can_be_reached(address) if address is not None else _is_a_host_name(host)):
        rule = "must be an address, a host name or an [IPv6 address] at which others reach it"
    elif address is not None and address in network:
        rule = f"is within --network {network}, which there is not before the hosts have met"
    else:
        return f"{host}:{number}", number
    fix = f"try {name}=203.0.113.5 or {name}=host.example.org:{port}"
    raise ConfigError(f"ENDPOINT of {name}", text, rule, fix)


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _can_be_reached(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return not (address.is_unspecified or address.is_loopback or address.is_multicast)


def _is_a_host_name(host: str) -> bool:
    labels = host.split(".")
    mistyped_address = labels[-1].isdecimal()
    return all(map(_LABEL.fullmatch, labels)) and len(host) <= 253 and not mistyped_address


def _check_together(hosts: Sequence[Host]) -> None:
    """What is wrong with none of them alone."""
    if len(hosts) < 2:
        rule = "is one host, and a network has two at least"
        raise ConfigError("NAME", hosts[0].name, rule, "give the others too")
    names: dict[str, str] = {}
    endpoints: dict[str, str] = {}
    for host in hosts:
        # Some file systems do not tell a from A.
        if host.name.lower() in names:
            rule = f"is given twice (also as {names[host.name.lower()]})"
            raise ConfigError("NAME", host.name, rule, "give every host a name of its own")
        names[host.name.lower()] = host.name
        if host.endpoint is None:
            continue
        other = endpoints.setdefault(host.endpoint.lower(), host.name)
        if other != host.name:
            setting, fix = (
                f"ENDPOINT of {host.name}",
                "give each host an address or port of its own",
            )
            raise ConfigError(setting, host.endpoint, f"is {other}'s too", fix)
    if not endpoints:
        rule = "no host has one, so none can reach any other"
        fix = f"give one to a host at least, such as {hosts[0].name}=203.0.113.5"
        raise ConfigError("ENDPOINT", "", rule, fix)


# -- what is written -----------------------------------------------------------------------------
@dataclass(frozen=True)
class KeyPair:
    """As WireGuard writes them: base64."""

    private: str = field(repr=False)  # lest a log shows it
    public: str


def new_key_pair() -> KeyPair:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    key = X25519PrivateKey.generate()
    return KeyPair(_base64(key.private_bytes_raw()), _base64(key.public_key().public_bytes_raw()))


def _base64(key: bytes) -> str:
    return base64.b64encode(key).decode("ascii")


def configurations(hosts: Sequence[Host]) -> dict[str, str]:
    """Every host's file by its name, with keys that are made here and kept nowhere else."""
    keys = {host.name: new_key_pair() for host in hosts}
    shared = {
        frozenset((one.name, other.name)): _base64(secrets.token_bytes(32))
        for one, other in combinations(hosts, 2)
    }
    return {host.name: _configuration(host, hosts, keys, shared) for host in hosts}


def _configuration(
    host: Host,
    hosts: Sequence[Host],
    keys: Mapping[str, KeyPair],
    shared: Mapping[frozenset[str], str],
) -> str:
    lines = [
        f"# {host.name}, one of {len(hosts)} hosts. This file holds secrets.",
        "[Interface]",
        f"PrivateKey = {keys[host.name].private}",
        f"Address = {host.address}/32",
    ]
    if host.port is not None:
        lines.append(f"ListenPort = {host.port}")
    for peer in hosts:
        if peer is host:
            continue
        lines += [
            "",
            f"# {peer.name}",
            "[Peer]",
            f"PublicKey = {keys[peer.name].public}",
            f"PresharedKey = {shared[frozenset((host.name, peer.name))]}",
            f"AllowedIPs = {peer.address}/32",
            *([f"Endpoint = {peer.endpoint}"] if peer.endpoint is not None else []),
            f"PersistentKeepalive = {_KEEPALIVE_S}",
        ]
    return "\n".join(lines) + "\n"


def _require_new(output: Path) -> None:
    try:
        taken = output.exists() and (not output.is_dir() or any(output.iterdir()))
    except OSError as error:
        raise _unusable(output, error) from None
    if taken:
        rule = "already exists and is not an empty folder, and keys are never overwritten"
        fix = "choose another, or remove it if its keys are used nowhere"
        raise ConfigError("--output", str(output), rule, fix)


def _write(output: Path, files: Mapping[str, str]) -> None:
    try:
        output.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in files.items():
            (output / name).mkdir(mode=0o700)
            file = output / name / _FILE
            file.touch(mode=0o600, exist_ok=False)  # before there is a key in it to be read
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unusable(output, error) from None


def _unusable(output: Path, error: OSError) -> ConfigError:
    reason = (error.strerror or "cannot be written").lower()
    return ConfigError("--output", str(output), reason, "choose a folder that can be written to")


# -- what is said --------------------------------------------------------------------------------
def _what_next(hosts: Sequence[Host], output: Path) -> list[str]:
    coordinator = next(host for host in hosts if host.endpoint is not None)
    lines = [
        f"{host.name}: {host.address}, "
        + (f"reached at UDP {host.endpoint}" if host.endpoint is not None else "behind NAT")
        for host in hosts
    ]
    behind_nat = [host.name for host in hosts if host.endpoint is None]
    if len(behind_nat) > 1:
        lines.append(
            f"{' and '.join(behind_nat)} cannot reach each other: they have no ENDPOINT. A mesh"
            " needs its hosts to reach each other, so let only one of them take part."
        )
    return [
        *lines,
        "",
        f"Move each host's {output}/NAME/{_FILE} to it, over ssh. There, as root:",
        f"    install -m 600 {_FILE} /etc/wireguard/{_FILE}",
        f"    wg-quick up {_INTERFACE}",
        f"Then, on {coordinator.name}:",
        f"    asyncmesh coordinator --bind {coordinator.address}",
        "and on every host that computes (replicas are counted from 0):",
        f"    asyncmesh join --coordinator {coordinator.address}:{_COORDINATOR_PORT} --replica R",
    ]
