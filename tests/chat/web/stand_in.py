"""A program that speaks as Textual's driver for browsers does: shows its environment and what is typed.

`python -m tests.chat.web.stand_in [deaf|stuck|broken|faulty|refused]`: does not end when it is told to, takes nothing of what
is typed, loses its way in the protocol when something is, ends by a traceback, ends by an error of ours.
"""

from __future__ import annotations

import json
import os
import sys
import time


def write(kind: bytes, payload: bytes) -> None:
    os.write(1, kind + len(payload).to_bytes(4, "big") + payload)


def read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (piece := os.read(0, size - len(data))):
            sys.exit(0)
        data += piece
    return data


def main(manner: str) -> None:
    if manner == "refused":
        os.write(2, b"error: the chats cannot be read \x1b]0;bad\x07\nmove them away\n")
        sys.exit(2)
    os.write(1, b"__GANGLION__\n")
    write(b"D", json.dumps(dict(os.environ)).encode())
    if manner == "faulty":
        raise RuntimeError("secret words")
    if manner == "stuck":
        time.sleep(1000)
    while True:
        kind, payload = read(1), read(int.from_bytes(read(4), "big"))
        if kind == b"D":
            write(b"D", b"typed " + payload)
            if manner == "broken":
                os.write(1, b"X" * 100)
        elif json.loads(payload)["type"] != "quit":
            write(b"D", payload)
        elif manner != "deaf":
            write(b"M", json.dumps({"type": "exit"}).encode())
            return


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
