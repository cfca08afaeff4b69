"""`--anonymise`: texts without what identifies a machine, a person or a network."""

from __future__ import annotations

import getpass
import ipaddress
import os
import re
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stagewright.bench.result import Found, from_json

Clean = Callable[[str], str]
_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_MAC = re.compile(r"\b[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}\b")
_V4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
_V6 = re.compile(r"(?<![\w:.])(?=[0-9a-fA-F:]*:[0-9a-fA-F:]*:)[0-9a-fA-F:]{3,39}(?:%\w+)?(?![\w:])")
_PATH = re.compile(r"(?<![\w.)\]>])(?:~?/)(?:[^\s/\"'`:;,<>|()\[\]{}\\]+/)+([^\s/\"'`:;,<>|()\[\]{}\\]*)")


def make_cleaner() -> Clean:
    """A function that removes names of this machine and its user, paths, addresses and UUIDs from a text."""
    names = _own_names()
    known = re.compile("|".join(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])" for name in names), re.IGNORECASE)

    def clean(text: str) -> str:
        text = _UUID.sub("<uuid>", text)
        text = _PATH.sub(lambda match: f"<path>/{match[1]}" if "." in match[1] else "<path>", text)
        text = _MAC.sub("<address>", text)
        text = _V4.sub(_address, text)
        text = _V6.sub(_address, text)
        return known.sub("<name>", text) if names else text

    return clean


def _own_names() -> list[str]:
    """Names of this machine, its user and the user's folder, the longest first."""
    host = socket.gethostname()
    found = {host, host.partition(".")[0], socket.getfqdn(), os.uname().nodename, Path.home().name, _user()}
    found |= {os.environ.get(name, "") for name in ("HOSTNAME", "USER", "LOGNAME", "SUDO_USER")}
    plain = {"", "localhost", "localhost.localdomain"}
    return sorted(found - plain, key=len, reverse=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without an entry
        return ""


def _address(match: re.Match[str]) -> str:
    """Keep addresses that are the same on every machine: loopback, and the one that means all."""
    try:
        address = ipaddress.ip_address(match[0].partition("%")[0])
    except ValueError:
        return match[0]
    return match[0] if address.is_loopback or address.is_unspecified else "<address>"


def anonymous(outcome: Found, clean: Clean) -> Found:
    """The same outcome with every text cleaned."""
    return from_json(cleaned(asdict(outcome), clean) | {"is_anonymised": True}, "the outcome", type(outcome))


def cleaned(value: Any, clean: Clean) -> Any:
    """The same nested value with every text cleaned, keys included."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {cleaned(key, clean): cleaned(entry, clean) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [cleaned(entry, clean) for entry in value]
    return value
