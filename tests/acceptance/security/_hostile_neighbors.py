"""Hostile programs, continued: against the guard, the grader and their user, places for all, and the kernel's memory.

See `_hostile_programs`, which adds what they have in common.
"""

LIBC = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"

NEIGHBORS = {
    # the guard, the grader and their user
    "reads the expected output from memory": """
for pid in ANCESTORS:
    try:
        maps = [line.split() for line in open(f"/proc/{pid}/maps")]
        memory = open(f"/proc/{pid}/mem", "rb")
    except OSError: continue
    harm("memory of", pid)
""",
    "reads the environment of its ancestors": """
for pid in ANCESTORS:
    try: harm("environment of", pid, len(open(f"/proc/{pid}/environ", "rb").read()))
    except OSError: pass
""",
    "writes to the descriptors of its guard": """
for pid in ANCESTORS:
    for fd in range(64):
        try: os.write(os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK), b"garbage"); harm(pid, fd)
        except OSError: pass
sys.exit(1)
""",
    "reads the descriptors of its guard": """
for pid in ANCESTORS:
    for fd in range(64):
        try: os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK); harm(pid, fd)
        except OSError: pass
""",
    "claims its guard's descriptors by pidfd": LIBC
    + """
for pid in ANCESTORS:
    handle = libc.syscall(434, pid, 0)
    for fd in range(32):
        if handle >= 0 and libc.syscall(438, handle, fd, 0) >= 0: harm("descriptor", fd, "of", pid)
""",
    "reads its guard's memory by a system call": LIBC
    + """
number = {"x86_64": 310, "aarch64": 270}[os.uname().machine]
class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(8)
here, there = Vector(ctypes.addressof(buffer), 8), Vector(0x400000, 8)
for pid in ANCESTORS:
    if libc.syscall(number, pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) >= 0: harm("memory of", pid)
""",
    "kills its guard": """
for number in (9, 15, 19, 6, 11):
    tried(os.kill, os.getppid(), number)
sys.exit(1)
""",
    "kills its grader by a queue of signals": LIBC
    + """
for pid in (PARENT, os.getppid()):
    for number in (10, 15): libc.sigqueue(pid, number, 0)
    if PARENT > 1: tried(os.killpg, pid, 15)
""",
    "kills its grader by the owner of a pipe": """
import fcntl
F_SETSIG = 10
for pid in (PARENT, os.getppid()):
    r, w = os.pipe()
    def aim():
        fcntl.fcntl(r, fcntl.F_SETOWN, pid); fcntl.fcntl(r, F_SETSIG, 9)
        fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(w, b"x")
    tried(aim)
""",
    "kills its grader by the owner of a socket": """
import fcntl, socket, struct
def aim():
    a, b = socket.socketpair()
    fcntl.ioctl(a, 0x8901, struct.pack("i", PARENT)); fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    b.send(b"x")
tried(aim)
""",
    "limits its grader": """
import resource
for pid in ANCESTORS:
    for name in ("NOFILE", "FSIZE", "NPROC"):
        tried(resource.prlimit, pid, getattr(resource, f"RLIMIT_{name}"), (0, 0))
sys.exit(1)
""",
    "limits the time of its guard": """
import resource
for pid in (os.getppid(), PARENT): tried(resource.prlimit, pid, resource.RLIMIT_CPU, (0, 0))
time.sleep(60)
""",
    "slows its grader down": """
if tried(os.setpriority, os.PRIO_PROCESS, PARENT, 19): harm("priority")
tried(os.setpriority, os.PRIO_USER, os.getuid(), 19)
tried(os.sched_setaffinity, PARENT, {0})
tried(os.sched_setscheduler, PARENT, os.SCHED_IDLE, os.sched_param(0))
""",
    "hides from its grader": LIBC
    + """
libc.prctl(4, 0, 0, 0, 0)
for i in range(200_000): open(f"f{i}", "w").close()
harm("200,000 files")
""",
    "waits for its guard's memory to become readable": """
end = time.monotonic() + 0.4
while time.monotonic() < end:
    for pid in ANCESTORS:
        try: open(f"/proc/{pid}/mem", "rb"); harm("memory of", pid)
        except OSError: pass
""",
    # files of the user, and places that all may write to
    "deletes files of the home": """
for name in (os.listdir(HOME) if tried(os.listdir, HOME) else (".bashrc", "thesis.txt")):
    tried(os.unlink, f"{HOME}/{name}")
""",
    "writes to the start files of the shell": """
for name in (".bashrc", ".profile", ".ssh/authorized_keys", ".config/autostart/x", ".pythonrc.py"):
    try:
        with open(f"{HOME}/{name}", "a") as file: file.write("harm"); harm(name)
    except OSError: pass
""",
    "changes modes of files of the home": """
for path in (f"{HOME}/.bashrc", HOME, SECRET, FOLDER):
    try: os.chmod(path, 0o777); harm("mode of", path)
    except OSError: pass
""",
    "changes times and attributes": """
for path in (f"{HOME}/.bashrc", HOME, SECRET):
    try: os.utime(path, (1, 1)); harm("time of", path)
    except OSError: pass
    try: os.setxattr(path, "user.harm", b"1"); harm("attribute of", path)
    except OSError: pass
""",
    "empties files of the home": "tried(os.truncate, f'{HOME}/thesis.txt', 0); tried(os.truncate, SECRET, 0)",
    "moves files of the home": """
tried(os.rename, f"{HOME}/thesis.txt", "thesis.txt"); tried(os.link, f"{HOME}/thesis.txt", "link")
tried(os.rename, f"{HOME}/.bashrc", f"{HOME}/gone"); tried(os.symlink, "/nowhere", f"{HOME}/new")
if os.path.exists("link"): harm("link")
""",
    "leaves files in places for all": """
for folder in ("/dev/shm", "/tmp", "/var/tmp", "/run/lock", "/run/user", "/var/lock", "/dev/mqueue", "/var/crash"):
    try:
        with open(f"{folder}/left-" + str(os.getpid()), "wb") as file: file.write(b"x" * (1 << 20))
    except OSError: pass
""",
    "leaves unnamed files in places for all": """
held = []
for folder in ("/dev/shm", "/var/tmp", "/run/lock", FOLDER, HOME):
    try: fd = os.open(folder, os.O_TMPFILE | os.O_RDWR); os.write(fd, b"x"); held.append(folder)
    except OSError: pass
if any(folder != "/dev/shm" for folder in held): harm(held)
""",
    "fills the disk with deleted files": """
held = []
for i in range(100):
    file = open(f"f{i}", "wb"); os.unlink(f"f{i}"); held.append(file)
    file.write(b"x" * (4 << 20)); file.flush(); time.sleep(0.01)
harm("400 MiB in deleted files")
""",
    "fills the disk with folders": """
for i in range(300_000): os.mkdir(f"d{i}")
harm("300,000 folders")
""",
    "leaves folders that cannot be removed": """
os.mkdir("shut"); os.mkdir("shut/inner"); open("shut/inner/file", "w").close()
for path in ("shut/inner", "shut"): tried(os.chmod, path, 0)
os.mkdir("never", 0)
""",
    "leaves folders deeper than any path": """
for i in range(1500): os.mkdir("d"); os.chdir("d")
""",
    "overwrites a file on a mounted volume": """
for path in [f"{VOLUME}/volume.txt"] if VOLUME else []:
    try:
        with open(path, "a") as file: file.write("harm"); harm(path)
    except OSError: pass
    tried(os.unlink, path); tried(open, f"{VOLUME}/new", "w")
""",
    "makes a mount writable": LIBC
    + """
attributes = (ctypes.c_uint64 * 4)(0, 1, 0, 0)
for path in (b"/", b"/usr", VOLUME.encode() or b"/usr"):
    if libc.syscall(442, -100, path, 0x8000, ctypes.byref(attributes), 32) == 0: harm("mount_setattr", path)
    if libc.mount(None, path, None, 32 | 4096, None) == 0: harm("remount", path)
""",
    "opens files by their handles": LIBC
    + """
numbers = {"x86_64": (303, 304), "aarch64": (264, 265)}[os.uname().machine]
handle, mount = ctypes.create_string_buffer(b"\\x80" + bytes(135), 136), ctypes.c_int()
if libc.syscall(numbers[0], -100, b"/usr", handle, ctypes.byref(mount), 0) == 0: harm("a handle")
if libc.syscall(numbers[1], -100, handle, 0) >= 0: harm("opened")
""",
    # standard input
    "writes to its standard input": """
try: os.write(0, b"x"); harm("wrote")
except OSError: pass
for path in ("/dev/stdin", "/proc/self/fd/0"):
    tried(os.chmod, path, 0o666)
    try: os.write(os.open(path, os.O_RDWR), b"x" * 1000); harm("wrote", path)
    except OSError: pass
""",
    "lets its standard input grow": """
tried(os.ftruncate, 0, 1 << 30); tried(os.posix_fallocate, 0, 0, 1 << 24)
if os.fstat(0).st_size > 1000: harm("grew")
""",
    # kernel memory and objects that outlive a process
    "queues of System V": LIBC
    + """
for _ in range(100):
    if libc.msgget(0, 0o1600) >= 0: harm("a queue"); break
""",
    "semaphores of System V": LIBC + "if libc.semget(0, 100, 0o1600) >= 0: harm('semaphores')",
    "queues of POSIX": LIBC
    + """
for number in (240, 180):
    if libc.syscall(number, b"harm", 0o102, 0o600, None) >= 0 and os.uname().machine == "x86_64" and number == 240:
        harm("a queue")
""",
    "semaphores of POSIX": """
import ctypes.util
lib = ctypes.CDLL(ctypes.util.find_library("pthread") or None)
lib.sem_open.restype = ctypes.c_void_p
lib.sem_open(b"/harm-semaphore", os.O_CREAT, 0o600, 1)
""".replace("import ctypes.util", "import ctypes, ctypes.util"),
    "shared memory of POSIX": """
from multiprocessing import shared_memory
tried(lambda: shared_memory.SharedMemory("harm", create=True, size=1 << 20))
os._exit(0)
""",
    "memory in socket pairs": """
import socket
r, w = os.pipe()
for _ in range(11):
    if os.fork() == 0: break
held, total = [], 0
try:
    while True:
        for end in socket.socketpair():
            end.setblocking(False); held.append(end)
            try:
                while True: total += end.send(b"x" * 65536)
            except BlockingIOError: pass
except OSError: pass
os.write(w, b"x" * (total >> 20))
time.sleep(1.5)
os.set_blocking(r, False)
count = len(os.read(r, 1 << 16))
if count > 256: harm(count, "MiB in sockets")
""",
    "memory in sockets in flight": """
import array, socket
held, total = [], 0
def send():
    global total
    a, b = socket.socketpair(); c, d = socket.socketpair(); a.setblocking(False)
    try:
        while True: total += a.send(b"x" * 65536)
    except BlockingIOError: pass
    c.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [a.fileno(), b.fileno()]))])
    a.close(); b.close(); held.append((c, d))
while tried(send): pass
if total > 256 << 20: harm(total >> 20, "MiB in flight")
""",
    "memory in pipes": """
import fcntl
held, total = [], 0
try:
    while True:
        r, w = os.pipe(); os.set_blocking(w, False); held.append((r, w))
        try: fcntl.fcntl(w, 1031, 1 << 20)
        except OSError: pass
        try:
            while True: total += os.write(w, b"x" * 65536)
        except BlockingIOError: pass
except OSError: pass
if total > 128 << 20: harm(total >> 20, "MiB in pipes")
""",
    "signals without end in its own queue": LIBC
    + """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {40})
count = 0
while count < 20_000 and libc.sigqueue(os.getpid(), 40, 0) == 0: count += 1
if count >= 20_000: harm(count, "signals in its queue")
""",
    "timers without end": LIBC
    + """
number = {"x86_64": 222, "aarch64": 107}[os.uname().machine]
count, timer = 0, ctypes.c_int()
while count < 20_000 and libc.syscall(number, 0, None, ctypes.byref(timer)) == 0: count += 1
if count >= 20_000: harm(count, "timers")
""",
    "keys in the kernel": LIBC
    + """
number = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
if libc.syscall(number, b"user", b"harm", b"x" * 100, 100, -4) >= 0: harm("a key")
""",
    # what outlives the program
    "leaves daemons that start others": """
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            if os.fork(): os._exit(0)
        except OSError: pass
time.sleep(0.1)
""",
    "leaves daemons that ignore signals": """
import signal
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        if os.fork(): os._exit(0)
        os.closerange(0, 128)
        while True: time.sleep(60)
""",
    "leaves daemons when its time is over": """
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        while True: time.sleep(60)
time.sleep(60)
""",
    "leaves orphans that it adopts": LIBC
    + """
libc.prctl(36, 1, 0, 0, 0)
for _ in range(4):
    if os.fork() == 0:
        if os.fork(): os._exit(0)
        os.setsid(); time.sleep(60)
""",
    "leaves a stopped process": """
import signal
if os.fork() == 0:
    os.setsid(); signal.raise_signal(signal.SIGSTOP)
time.sleep(0.05)
""",
    "leaves a child of its guard": LIBC
    + """
number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
if libc.syscall(number, 0x8000 | 17, 0, 0, 0, 0) == 0:  # CLONE_PARENT
    while True: time.sleep(60)
""",
}
