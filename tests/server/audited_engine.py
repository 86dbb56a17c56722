"""In place of the interpreter of supervisor and engine: writes down what it does that could be
turned against it. `audited_engine.py EVENTS CALLED_AS -P -m MODULE ARGUMENTS...`
"""

import os
import runpy
import sys

WATCHED = {
    *("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"),
    *("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request", "compile"),
}


def main() -> None:
    """Runs the module as `python -m` does, under an audit hook that writes to EVENTS."""
    events, called_as, *words = sys.argv[1:]
    assert words[:2] == ["-P", "-m"], words
    module, arguments = words[2], words[3:]
    log = os.open(events, os.O_WRONLY | os.O_APPEND)
    os.write(log, f"begin {module}\n".encode())

    def hook(event: str, details: tuple[object, ...]) -> None:
        if event in WATCHED:
            os.write(log, f"{event} {str(details)[:200]!r}\n".encode())

    sys.executable = called_as  # the supervisor starts the engine with it
    sys.argv = [module, *arguments]
    sys.addaudithook(hook)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
