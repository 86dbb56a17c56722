"""What the processes of a server leave open to others."""

import mmap
import os
import stat
import tempfile

from slipstream_contract.runtime import hide_shared_memory


def test_what_a_process_has_mapped_of_shared_memory_is_its_users_alone():
    with (
        tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="slipstream test ") as ours,
        tempfile.NamedTemporaryFile(dir="/dev/shm") as unmapped,
        tempfile.NamedTemporaryFile() as elsewhere,
    ):
        for file in (ours, unmapped, elsewhere):
            file.write(b"x" * 10)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
        with mmap.mmap(ours.fileno(), 10), mmap.mmap(elsewhere.fileno(), 10):
            hide_shared_memory()
        modes = [
            stat.S_IMODE(os.fstat(file.fileno()).st_mode) for file in (ours, unmapped, elsewhere)
        ]
        assert modes == [0o600, 0o644, 0o644]
