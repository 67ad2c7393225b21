"""The address of a server of Spark Connect, with the session that a slot's driver has there (pure)."""

from __future__ import annotations

INTERRUPT_S = 90
"""How long ending what a killed driver has left on the server may take, before its stages hear of its end; on a busy machine
the imports alone take half a minute."""


def with_session(address: str, session_id: str) -> str:
    """The address that leads to one session, whoever connects.

    Args:
        address: as of ``spark.remote``, which names none.
        session_id: a UUID.

    Example: parameters stay.
        >>> with_session("sc://host:15002", "8d7e6f0c-0000-4000-8000-000000000000")
        'sc://host:15002/;session_id=8d7e6f0c-0000-4000-8000-000000000000'
        >>> with_session("sc://host/;use_ssl=true;", "8d7e6f0c-0000-4000-8000-000000000000")
        'sc://host/;use_ssl=true;session_id=8d7e6f0c-0000-4000-8000-000000000000'
    """
    place, _, parameters = address.partition("/;")
    given = [one for one in parameters.split(";") if one]
    return f"{place.rstrip('/')}/;{';'.join([*given, f'session_id={session_id}'])}"
