"""Hostile programs for the acceptance test of the sandbox: name -> source.

Each prints a line that begins with HARM when it succeeds. `sys.argv` holds its targets: a folder that everyone may
write to, a file that everyone may read, the process that grades it, a loopback port that listens, the home of the user
who grades, and a volume mounted below a folder that programs see (or nothing). `ESSENTIAL` names the programs of the
classes that once did harm; CI runs them with every isolation.
"""

from _hostile_neighbors import LIBC as _LIBC
from _hostile_neighbors import NEIGHBORS

_HEAD = """
import os, sys, time
FOLDER, SECRET, PARENT, PORT, HOME, VOLUME = *sys.argv[1:3], *map(int, sys.argv[3:5]), *sys.argv[5:7]
ANCESTORS = (os.getppid(), PARENT, 1)
def harm(*what):
    print("HARM", *what, flush=True)
def tried(action, *args):
    try:
        result = action(*args)
    except Exception as error:
        print(type(error).__name__, str(error)[:80])
        return None
    return True if result is None else result
"""

_BODIES = {
    # processes
    "fork bomb": "while True: os.fork()",
    "fork bomb that continues after errors": """
while True:
    try: os.fork()
    except OSError: pass
""",
    "fork bomb of brief processes": """
while True:
    try:
        if os.fork(): os._exit(0)
    except OSError: pass
""",
    "bomb of threads": """
import threading
while True:
    try: threading.Thread(target=time.sleep, args=(60,)).start()
    except RuntimeError: pass
""",
    "bomb of shells": """
import subprocess
while True:
    try: subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"])
    except OSError: pass
""",
    "becomes itself for ever": """
again = "import os, sys; os.execv(sys.executable, sys.orig_argv)"
os.execv(sys.executable, [sys.executable, "-S", "-c", again])
""",
    "makes zombies": """
for _ in range(200):
    try:
        if os.fork() == 0: os._exit(0)
    except OSError: break
""",
    # memory
    "memory bomb": "held = bytearray(1 << 40)",
    "memory bomb in small pieces": "held = []\nwhile True: held.append(bytearray(1 << 20))",
    "memory bomb that goes on": """
held = []
while True:
    try: held.append(bytearray(b"x") * (4 << 20))
    except MemoryError: time.sleep(0.01)
""",
    "memory of many processes": """
for _ in range(8):
    if os.fork() == 0: break
held = bytearray(b"x") * (100 << 20)
time.sleep(60)
""",
    "shared memory": """
import mmap
held = []
for _ in range(8):
    held.append(mmap.mmap(-1, 64 << 20)); held[-1].write(b"x" * (64 << 20))
harm("512 MiB of shared memory")
""",
    "memory without an address": """
for _ in range(64):
    fd = os.memfd_create("m"); os.write(fd, b"x" * (8 << 20))
harm("512 MiB of files in memory")
""",
    "memory of System V": _LIBC
    + """
if libc.shmget(0, 64 << 20, 0o1600) >= 0: harm("a segment of shared memory")
""",
    "memory in /dev/shm": """
for i in range(64):
    with open(f"/dev/shm/{i}", "wb") as file: file.write(b"x" * (8 << 20))
harm("512 MiB in /dev/shm")
""",
    # output
    "endless output": "while True: print('x' * 1000)",
    "endless errors": "while True: print('x' * 1000, file=sys.stderr)",
    "endless output of a child": "os.fork()\nwhile True: os.write(1, b'x' * 65536)",
    # disk
    "fills the disk with one file": """
with open("large", "wb") as file:
    while True: file.write(b"x" * (1 << 20))
""",
    "fills the disk with many files": """
for i in range(10_000):
    with open(f"f{i}", "wb") as file: file.write(b"x" * (1 << 20))
harm("10 GB on disk")
""",
    "fills the disk with empty files": """
for i in range(2_000_000): open(f"f{i}", "w").close()
harm("2,000,000 files")
""",
    "a file of a terabyte": "open('sparse', 'wb').truncate(1 << 40); harm('a file of 1 TiB')",
    "folders without end": """
while True: os.mkdir("d"); os.chdir("d")
""",
    # reading
    "reads the environment": """
for name, value in os.environ.items():
    if "CANARY" in name or "canary" in value: harm(name)
""",
    "reads the environment of others": """
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if b"canary" in open(f"/proc/{pid}/environ", "rb").read(): harm("environment of", pid)
    except OSError: pass
""",
    "reads the home": """
homes = ["/root", os.path.expanduser("~"), os.path.dirname(SECRET)]
homes += [f"/home/{name}" for name in (os.listdir("/home") if os.path.exists("/home") else ())]
for name in (f"{home}/{name}" for home in homes if os.path.isdir(home) for name in os.listdir(home)):
    if "canary" in name or name.endswith((".ssh", "history", ".netrc", ".aws", ".gitconfig", ".bashrc")): harm(name)
""",
    "reads files of others": "harm(tried(open, SECRET)) if tried(open, SECRET) else None",
    "reads the passwords": "harm() if tried(open, '/etc/shadow') else None",
    "reads files of others through /proc": """
for pid in filter(str.isdigit, os.listdir("/proc")):
    for link in ("root", "cwd"):
        try: open(f"/proc/{pid}/{link}{SECRET}"); harm(pid, link)
        except OSError: pass
""",
    # writing and escaping
    "writes outside": "harm() if tried(open, f'{FOLDER}/written', 'w') else None",
    "poisons Python": """
import json
for folder in [os.path.dirname(json.__file__), *sys.path, "/usr/lib", "/usr/local", "/etc", "/"]:
    if os.path.isdir(folder) and not os.path.samefile(folder, "."):
        try: open(f"{folder}/sitecustomize.py", "w"); harm(folder)
        except OSError: pass
""",
    "escapes by a symlink": """
os.symlink(SECRET, "link"); os.symlink(FOLDER, "folder")
if tried(open, "link"): harm("read")
if tried(open, "folder/written", "w"): harm("wrote")
""",
    "escapes by going up": """
path = "../" * 40
if tried(open, path + SECRET): harm("read")
if tried(open, f"{path}{FOLDER}/written", "w"): harm("wrote")
""",
    "escapes by another root": "harm() if tried(os.chroot, '.') else None",
    "mounts": _LIBC + "if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: harm('mounted')",
    "makes itself root in a user namespace": _LIBC + "if libc.unshare(0x10000000) == 0: harm('unshared')",
    "clones into a user namespace": _LIBC
    + """
number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
if libc.syscall(number, 0x10000000 | 17, 0, 0, 0, 0) >= 0: harm("cloned")
""",
    "becomes root": _LIBC
    + """
for action in (os.setuid, os.setgid, os.seteuid): tried(action, 0)
number = {"x86_64": 125, "aarch64": 90}[os.uname().machine]
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.syscall(number, header, sets)
if any(sets): harm("has the rights", list(sets))  # user 0 of a namespace without rights is nobody
if tried(os.chown, ".", 1, 1): harm("gives files away")
""",
    "writes to every descriptor": """
for fd in range(3, 128):
    try: os.write(fd, b"0\\n0\\n0\\n"); harm("descriptor", fd)
    except OSError: pass
""",
    "changes the kernel's settings": """
for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/panic", "/proc/sys/vm/drop_caches", "/sys/power/state"):
    try: open(path, "w").close(); harm(path)
    except OSError: pass
""",
    "opens devices": """
for name in ("mem", "kmem", "kmsg", "sda", "vda", "nvme0n1", "fuse", "kvm"):
    try: open(f"/dev/{name}", "rb"); harm(name)
    except OSError: pass
""",
    "types into the terminal": """
import fcntl, termios
for name in ("/dev/tty", "/dev/stdin"):
    try: fcntl.ioctl(os.open(name, os.O_RDWR), termios.TIOCSTI, b"x"); harm(name)
    except OSError: pass
""",
    # network, loopback alone
    "connects": """
import socket
tried(socket.create_connection, ("127.0.0.1", PORT), 1) and harm("connected")
tried(socket.create_connection, ("::1", PORT), 1) and harm("connected")
""",
    "sends a datagram": """
import socket
tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", PORT))) and harm("sent")
""",
    "listens": "import socket\ntried(socket.create_server, ('127.0.0.1', 0)) and harm('listens')",
    "talks to a service by a socket file": """
import socket
def talk():
    socket.socket(socket.AF_UNIX).connect(f"{FOLDER}/socket")
tried(talk) and harm("connected")
""",
    "fetches by curl": """
import subprocess
done = tried(subprocess.run, ["sh", "-c", f"curl -s -m 1 127.0.0.1:{PORT} || exec 3<>/dev/tcp/127.0.0.1/{PORT}"])
done and done is not True and done.returncode == 0 and harm("connected")
""",
    # others' processes
    "kills its grader": "for number in (15, 9):\n    if tried(os.kill, PARENT, number): print('sent')",
    "kills all": """
for number in (15, 9, 19):
    tried(os.kill, 1, number); tried(os.kill, -1, number); tried(os.killpg, 0, number)
    tried(os.kill, os.getppid(), number)
""",
    "kills by every number": """
for pid in range(2, 70_000):
    if pid != os.getpid():
        try: os.kill(pid, 9)
        except OSError: pass
""",
    "traces its grader": _LIBC
    + """
for pid in (PARENT, os.getppid(), 1):
    if libc.ptrace(16, pid, 0, 0) == 0: harm("traces", pid)
""",
    "reads its grader's memory": _LIBC
    + """
for pid in (PARENT, os.getppid(), 1):
    for way in ("r", "r+"):
        try: open(f"/proc/{pid}/mem", way + "b"); harm("memory of", pid)
        except OSError: pass
""",
    "slows others down": """
if tried(os.setpriority, os.PRIO_PROCESS, 0, -20): harm("priority")
if tried(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50)): harm("real time")
""",
    # ending
    "ignores all signals": """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(60)
""",
    "computes for ever": "while True: pass",
    "computes without ever looking up": "print(len(str(9 ** 9 ** 8)))",
    "stops itself": "import signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "closes all and waits": "os.closerange(0, 128); time.sleep(60)",
    "leaves a daemon that holds the pipes": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
print("gone")
""",
    "leaves a daemon that does harm later": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 128)
        time.sleep(0.5)
        open(f"{FOLDER}/later", "w").close()
    os._exit(0)
os._exit(0)
""",
    "leaves a daemon by nohup": "os.system('nohup setsid sleep 61 >/dev/null 2>&1 &')",
    "does not let itself end": """
import atexit
@atexit.register
def again():
    while True: time.sleep(60)
""",
    "raises its limits": """
import resource
for name in ("AS", "NPROC", "CPU", "FSIZE", "NOFILE"):
    if tried(resource.setrlimit, getattr(resource, f"RLIMIT_{name}"), (-1, -1)): harm(name)
""",
    "opens files without end": """
held = []
while True: held.append(open("/dev/null"))
""",
    "crashes with a core": _LIBC + "ctypes.string_at(0)",
    "crashes the parser": "eval('(' * 100_000 + ')' * 100_000)",
    "recurses without end": """
sys.setrecursionlimit(10**9)
class A:
    def __repr__(self): return repr([self])
repr(A())
""",
    "asks the kernel for more": _LIBC
    + """
numbers = {"x86_64": (321, 298, 323, 250), "aarch64": (280, 241, 282, 219)}[os.uname().machine]
for number in (*numbers, 425):
    if libc.syscall(number, 0, 0, 0, 0, 0) >= 0: harm("system call", number)
""",
}

PROGRAMS = {name: _HEAD + body for name, body in (_BODIES | NEIGHBORS).items()}
PROGRAMS |= {
    "is no Python": "this is no Python",
    "holds a null byte": "print(1)\0",
    "holds half a character": "print('\ud800')",
    "is very long": "x = 1\n" * 500_000,
}

ESSENTIAL = (
    "reads the expected output from memory",
    "reads the environment of its ancestors",
    "writes to the descriptors of its guard",
    "kills its guard",
    "kills its grader by the owner of a pipe",
    "limits its grader",
    "deletes files of the home",
    "writes to the start files of the shell",
    "changes modes of files of the home",
    "leaves files in places for all",
    "overwrites a file on a mounted volume",
    "queues of System V",
    "leaves daemons that start others",
    "leaves folders deeper than any path",
    "memory in socket pairs",
    "writes to its standard input",
)
