"""Child process of the tests: answers each frame, and behaves as its second argument selects."""

import sys
import time

from forebay.cluster.ipc import ChildSocket, FrameCodec, begin_child
from tests.cluster.ipc.frames import BYTES_MAX, Said

link, (behaviour,) = begin_child(sys.argv[1:])
with link:
    end = ChildSocket(link, FrameCodec[Said, Said](Said, bytes_max=BYTES_MAX))
    if behaviour == "ends":
        sys.exit(7)
    if behaviour == "garbles":
        link.sendall(b"\0\0\0\1\xc1")
    try:
        while True:
            if end.is_readable(10):
                for said in end.receive():
                    end.send(Said(f"{behaviour}: {said.text}"))
    except EOFError:
        if behaviour == "lingers":
            time.sleep(60)
