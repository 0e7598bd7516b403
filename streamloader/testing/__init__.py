"""What tests of code that uses streamloader, or of a store for it, are made of. Public; needs no test framework.

`clock.py` is a clock that tests move, `order.py` computes the order of samples without the loader's code. `FaultProxy`
of `proxy.py` makes the requests to a real server fail, `HostName` of `dns.py` the resolution of its name. Names are
imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamloader.testing.dns import HostName as HostName
    from streamloader.testing.proxy import Fault as Fault
    from streamloader.testing.proxy import FaultProxy as FaultProxy

__all__ = ["Fault", "FaultProxy", "HostName"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = "dns" if name == "HostName" else "proxy"
        return getattr(import_module(f"streamloader.testing.{module}"), name)
    raise AttributeError(f"module 'streamloader.testing' has no attribute {name!r}")
