"""Asks a server's `/livez` at a fixed pace until a line comes on standard input; prints what it saw as JSON.

    python -m tests.reliability.probe http://127.0.0.1:3000 0.1

`seconds` holds each answer's time from the moment it was due, so a server that holds one probe up is charged for those
that would have been sent meanwhile.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time
from urllib.parse import urlsplit

TIMEOUT = 60.0


def probe(url: str, pace: float) -> dict[str, list[object]]:
    address = urlsplit(url)
    seconds: list[object] = []
    faults: list[object] = []
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT)
    due = time.monotonic()
    while True:
        wait = max(0.0, due - time.monotonic())
        if select.select([sys.stdin], [], [], wait)[0]:
            return {"seconds": seconds, "faults": faults}
        try:
            connection.request("GET", "/livez")
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                faults.append(str(answer.status))
        except OSError as error:
            faults.append(type(error).__name__)
            connection.close()
        seconds.append(time.monotonic() - due)
        due += pace


if __name__ == "__main__":
    json.dump(probe(sys.argv[1], float(sys.argv[2])), sys.stdout)
