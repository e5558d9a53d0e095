"""A limit of memory as a container has one: a control group of its own, of either version. Needs root."""

import os
import pathlib
import re

ROOT = pathlib.Path("/sys/fs/cgroup")
MIB = 1 << 20


class Container:
    """Processes that may hold so many MiB together; `with` makes and removes the group."""

    def __init__(self, mib):
        self.mib, self.is_second = mib, (ROOT / "cgroup.controllers").exists()
        self.folder = (ROOT if self.is_second else ROOT / "memory") / f"hostile-{os.getpid()}-{mib}"

    def __enter__(self):
        if self.is_second:
            (ROOT / "cgroup.subtree_control").write_text("+memory")
        self.folder.mkdir()
        (self.folder / ("memory.max" if self.is_second else "memory.limit_in_bytes")).write_text(str(self.mib * MIB))
        if self.is_second:
            (self.folder / "memory.swap.max").write_text("0")
        return self

    def __exit__(self, *_):
        self.folder.rmdir()

    def enter(self):
        """The process that calls is in it from now on, and so are those that it starts."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def anonymous_bytes(self):
        """What belongs to no file, and so cannot be given up."""
        name = "anon" if self.is_second else "total_rss"
        return int(re.search(rf"^{name} (\d+)", (self.folder / "memory.stat").read_text(), re.M)[1])

    def killed(self):
        """Processes that ended for want of memory."""
        name = "memory.events" if self.is_second else "memory.oom_control"
        return int(re.search(r"^oom_kill (\d+)", (self.folder / name).read_text(), re.M)[1])
