"""The kinds of change that a way back must undo: how the tree is made, and what a command then does to it.

Run as a program (`python kinds.py STRATEGY`) it tries them all as whoever it runs as and prints what did not come back.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from mulligan.exec.capture.notify import Capture, Notify
from mulligan.exec.command import Spools, command
from mulligan.exec.run import CommandResult, run
from tests.exec.trees import Recorder, Seen, put_back, tree

PYTHON = shlex.quote(sys.executable)


@dataclass(frozen=True)
class Kind:
    name: str
    given: str
    does: str


def _py(code: str) -> str:
    return f"{PYTHON} -S -c {shlex.quote(code)}"


KINDS = (
    Kind("nothing", "echo a > a", "cat a"),
    Kind("append", "echo a > a", "echo b >> a"),
    Kind("overwrite", "echo a > a", "echo b > a"),
    Kind("same size, mtime put back", "echo aa > a; touch -d 2020-01-01 a", "echo bb > a; touch -d 2020-01-01 a"),
    Kind("chmod only", "echo a > a", "chmod 600 a"),
    Kind("new file", "true", "echo a > a"),
    Kind("new file, exclusively", "true", "set -C; echo a > a"),
    Kind("deleted file", "echo a > a", "rm a"),
    Kind("tracked", "git init -q; echo a > a; echo b > b; git add .", "echo x > a; rm b; echo c > c; git add c"),
    Kind("ignored", "echo '*.o' > .gitignore; echo a > a.o; echo b > b.o", "echo x > a.o; rm b.o; echo c > c.o"),
    Kind("new folders", "true", "mkdir -p d/e/f; echo a > d/e/f/a"),
    Kind("removed folder", "mkdir -p d/e; echo a > d/e/a; echo b > d/b; ln -s b d/l", "rm -rf d"),
    Kind("renamed folder", "mkdir -p d/e; echo a > d/e/a; echo b > d/b", "mv d f"),
    Kind(
        "renamed folder, then changed",
        "mkdir d; echo a > d/a; echo b > d/b",
        "mv d f; echo x >> f/a; rm f/b; echo c > f/c",
    ),
    Kind("changed, then folder renamed", "mkdir d; echo a > d/a; echo b > d/b", "echo x >> d/a; echo n > d/n; mv d f"),
    Kind("folder replaced by another", "mkdir d e; echo a > d/a; echo b > e/a", "rm -rf d; mv e d; echo x >> d/a"),
    Kind("folders swapped over", "mkdir d e; echo a > d/a; echo b > e/b", "mv d t; mv e d; mv t e; echo x >> d/b"),
    Kind("new empty folder", "true", "mkdir d"),
    Kind("removed empty folder", "mkdir d", "rmdir d"),
    Kind("folder not removed, then changed", "mkdir d; echo a > d/a", "rmdir d 2>/dev/null; echo x > d/a; mv d e"),
    Kind("symlink retargeted", "echo a > a; ln -s a l", "ln -sfn b l"),
    Kind("written through a symlink", "echo a > a; ln -s a l", "echo x >> l"),
    Kind("written through a dangling symlink", "ln -s a l", "echo x > l"),
    Kind("below a symlinked folder", "mkdir d; echo a > d/a; ln -s d l", "echo x >> l/a; rm -f l/../d/a; echo y > l/b"),
    Kind("file to symlink", "echo a > a; echo b > b", "rm a; ln -s b a"),
    Kind("symlink to file", "echo b > b; ln -s b a", "rm a; echo x > a"),
    Kind("folder moved, a symlink left there", "mkdir -p d/s; echo a > d/a; echo b > d/s/b", "mv d e; ln -s e d"),
    Kind("folder to symlink", "mkdir d e; echo a > d/a; echo b > e/a", "rm -r d; ln -s e d; echo x > d/n"),
    Kind("symlink to folder", "mkdir e; echo a > e/a; ln -s e l", "rm l; mkdir l; echo x > l/a"),
    Kind("file to folder", "echo a > a", "rm a; mkdir a; echo b > a/b"),
    Kind("file to a folder that moved", "echo a > f; mkdir d; echo b > d/b", "rm f; mv d f; echo x >> f/b"),
    Kind("folder to file", "mkdir -p a/c; echo b > a/b", "rm -r a; echo x > a"),
    Kind("file to folder and back", "echo a > a", "rm a; mkdir a; echo b > a/b; rm -r a; echo c > a"),
    Kind("rename, then change", "echo a > a", "mv a b; echo x >> b"),
    Kind("rename over another", "echo a > a; echo b > b", "mv a b"),
    Kind("renamed twice and back", "echo a > a; echo b > b", "mv a t; mv b a; mv t b"),
    Kind(
        "exchanged",
        "mkdir d; echo a > d/a; echo b > b",
        _py("""
import ctypes
assert ctypes.CDLL(None).renameat2(-100, b"d", -100, b"b", 2) == 0
open("b/a", "a").write("x")
"""),
    ),
    Kind("another hard link", "echo a > a; ln a b", "echo x >> b"),
    Kind("another hard link, then removed", "mkdir d; echo a > a; ln a d/b", "echo x >> d/b; rm d/b"),
    Kind("new hard link, changed through it", "echo a > a", "ln a b; echo x >> b; rm b"),
    Kind("chmod of another hard link", "echo a > a; ln a b", "chmod 600 b"),
    Kind(
        "mmap write",
        "echo aaaa > a",
        _py("""
import mmap
with open("a", "r+b") as f, mmap.mmap(f.fileno(), 0) as m: m[0:2] = b"xx"
"""),
    ),
    Kind(
        "odd names",
        "echo a > \"$(printf 'new\\nline \\377 -x')\"; echo b > ' '",
        'for f in *; do echo x >> "./$f"; done; echo c > ...',
    ),
    Kind("CRLF", "printf 'a\\r\\nb\\r\\n' > a", "printf 'a\\nb\\n' > a"),
    Kind("binary", "printf '\\000\\001\\377' > a", "printf '\\377\\000' > a"),
    Kind(
        "nested repository", "mkdir n; git -C n init -q; echo a > n/a", "echo x > n/a; echo b > n/b; git -C n add a b"
    ),
    Kind("fifo", "mkfifo p", "rm p; mkfifo q; mkfifo p2; rm p2"),
    Kind("socket", "true", _py("import socket; socket.socket(socket.AF_UNIX).bind('s')")),
    Kind("sparse file", "truncate -s 8M a; echo end >> a", "truncate -s 1M a; echo x >> a"),
    Kind("truncated by name", "echo abc > a", _py("import os; os.truncate('a', 1)")),
    Kind("read-only file", "echo a > a; chmod 400 a", "chmod u+w a; echo b > a; chmod 400 a"),
    Kind("read-only file replaced", "echo a > a; chmod 400 a", "rm -f a; echo b > a"),
    Kind(
        "folder without write permission",
        "mkdir d; echo a > d/a; chmod 500 d",
        "chmod 700 d; echo b > d/b; rm d/a; chmod 500 d",
    ),
    Kind("0640", "echo a > a; chmod 640 a", "rm a; echo b > a; chmod 755 a"),
    Kind("setuid bit", "echo a > a; chmod 4755 a", "chmod 755 a"),
    Kind("sticky folder", "mkdir d; chmod 1777 d", "chmod 700 d; rmdir d; mkdir d"),
    Kind(
        "xattr",
        "echo a > a; mkdir d; "
        + _py("""
import os
os.setxattr('a', 'user.k', b'1'); os.setxattr('d', 'user.k', b'1')
"""),
        _py("""
import os
os.setxattr('a', 'user.k', b'2'); os.setxattr('a', 'user.new', b'3'); os.removexattr('d', 'user.k')
"""),
    ),
    Kind(
        "by descriptor",
        "echo a > a; mkdir d",
        _py("""
import os
f = os.open('a', os.O_RDONLY); os.fchmod(f, 0o600); os.setxattr(f, 'user.k', b'2'); os.utime(f, (1, 1))
os.utime(os.open('d', os.O_RDONLY), (1, 1)); os.chmod('d', 0o700)
"""),
    ),
    Kind(
        "reopened through /proc",
        "echo a > a",
        _py("""
import os
f = os.open('a', os.O_RDONLY); open(f'/proc/self/fd/{f}', 'w').write('x')
"""),
    ),
    Kind("through /dev/fd", "echo a > a", "exec 7< a; echo x > /dev/fd/7"),
    Kind(
        "unnamed file linked in",
        "true",
        _py("""
import ctypes, os
f = os.open('.', os.O_TMPFILE | os.O_RDWR, 0o600); os.write(f, b'x')
assert ctypes.CDLL(None).linkat(-100, b'/proc/self/fd/%d' % f, -100, b'n', 0x400) == 0
"""),
    ),
    Kind(
        "from another working directory",
        "mkdir -p d/e; echo a > d/a",
        "cd d/e; echo x >> ../a; cd ../..; echo b > ./d//e/../b",
    ),
    Kind(
        "by threads",
        "mkdir d; for i in 1 2 3 4 5 6 7 8; do echo $i > d/$i; done",
        _py("""
import threading, os
def work(i):
    for _ in range(20):
        open(f'd/{i}', 'a').write('x'); os.rename(f'd/{i}', f'd/t{i}')
        open(f'd/n{i}', 'w').close(); os.rename(f'd/t{i}', f'd/{i}')
threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 9)]
[t.start() for t in threads]; [t.join() for t in threads]
"""),
    ),
    Kind(
        "by descendants at once",
        "for i in 1 2 3 4; do echo $i > $i; done",
        "for i in 1 2 3 4; do (echo x >> $i; mv $i m$i) & done; wait",
    ),
    Kind("sed in place", "printf 'a\\nb\\n' > a", "sed -i s/a/x/ a"),
    Kind(
        "git commit",
        "git init -q; echo a > a; git add a",
        "git -c user.name=u -c user.email=e commit -qm m; echo b > b",
    ),
    Kind(
        "archive unpacked over",
        "mkdir s; echo a > s/a; echo b > b; tar --mtime=@0 -cf t.tar s; echo c > s/a",
        "tar xf t.tar",
    ),
    Kind("copied over", "mkdir s d; echo a > s/a; chmod 640 s/a; echo b > d/a", "cp -a s/. d/; cp -r s d/t"),
    Kind(
        "folder tree moved into a new one",
        "mkdir -p a/b; echo x > a/b/x",
        "mkdir n; mv a n/; echo y >> n/a/b/x; mv n/a/b .",
    ),
)

ONE_OF_EACH = frozenset(
    {
        *("append", "overwrite", "same size, mtime put back", "chmod only", "new file", "deleted file", "tracked"),
        *("ignored", "new folders", "removed folder", "renamed folder, then changed", "folders swapped over"),
        *("symlink retargeted", "written through a symlink", "folder to symlink", "file to folder", "folder to file"),
        *("rename over another", "another hard link", "mmap write", "odd names", "nested repository", "fifo", "socket"),
        *("sparse file", "read-only file replaced", "xattr", "by descendants at once", "git commit"),
    }
)
"""One kind of each sort of change. The fast lane tries these with every strategy, and the whole list with `notify`."""
assert {kind.name for kind in KINDS} >= ONE_OF_EACH


def make(kind: Kind, root: bytes) -> dict[bytes, Seen]:
    """The tree before the command."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.fsdecode(root), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["sh", "-ec", kind.given], cwd=root, env=environment, check=True, stdin=subprocess.DEVNULL)
    return tree(root)


def perform(kind: Kind, root: bytes, capture: Capture) -> CommandResult:
    spools = Spools()
    asked = command(["sh", "-c", kind.does], root, env={"HOME": os.fsdecode(root), "GIT_CONFIG_NOSYSTEM": "1"})
    ran = run(asked, capture=capture, sink=spools)
    assert ran.exit_code == 0, (kind.name, spools.stderr.inline())
    return ran


Wrong = dict[bytes, tuple[Seen | None, Seen | None]]


def wrong_after_putting_back(
    root: bytes, before: dict[bytes, Seen], touched: frozenset[bytes], *, moved_away: frozenset[bytes] = frozenset()
) -> Wrong:
    """For the ways that see afterwards: put back what they saw from a copy of everything, and compare."""
    whole = {os.path.normpath(os.path.join(root, path)): seen for path, seen in before.items()}
    inner = {path for path in whole if any(path.startswith(folder + b"/") for folder in moved_away)}
    put_back(touched | inner, whole)
    after = tree(root)
    wrong = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    return {path: (before.get(path), after.get(path)) for path in wrong}


def not_brought_back(kind: Kind, root: bytes) -> Wrong:
    """Do, put back from what the witness was told, compare: nothing if the tree is as it was."""
    before = make(kind, root)
    witness = Recorder()
    ran = perform(kind, root, Notify(witness))
    assert set(witness.preimages) <= ran.touched
    assert ran.shared == frozenset(), "nobody else was there"
    changed = {path for path, now in tree(root).items() if before.get(path) != now} | (
        before.keys() - tree(root).keys()
    )
    unseen = {path for path in changed if os.path.normpath(os.path.join(root, path)) not in ran.touched}
    put_back(ran.touched, witness.preimages)
    after = tree(root)
    wrong = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)} | unseen
    return {path: (before.get(path), after.get(path)) for path in wrong}


def main() -> None:
    for kind in KINDS:
        root = os.fsencode(os.path.realpath(tempfile.mkdtemp()))
        wrong = not_brought_back(kind, root)
        subprocess.run(["chmod", "-R", "u+w", root], check=True)
        shutil.rmtree(root)
        if wrong:
            print(kind.name, wrong)
    print(len(KINDS), "kinds as", os.geteuid())


if __name__ == "__main__":
    main()
