#!/usr/bin/env python3
"""Attacks ranks as a stranger who can reach their ports and does not know their token.

    strangers_test.py REPRISE [--attacks N] [--seed N]

Without --attacks, ten attacks of each sort are made on one training at the same time. With
it, there are N trainings with one attack each, at random times, and starts on a port that
another program holds. A training that is attacked must end as if it had not been: with the
same metrics, without more memory, in time.
"""
import argparse
import os
import pathlib
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

FLAGS = ("--model mlp --depth 2 --width 32 --data random --random-samples 150 --global-batch 10 "
         "--batch 2 --workers 1 --device cpu --backend gloo --rank-timeout 5").split()
LIMIT_S = 90  # of one training; an undisturbed one takes a few seconds
MOST_MORE_MEMORY = 256 << 20  # bytes of address space
FAULT = b"a stranger ends this training"


def ports_of(pids):
    """(port, address, process) of all listening sockets of processes."""
    owners = {}
    for pid in pids:
        try:
            for entry in os.scandir(f"/proc/{pid}/fd"):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    owners[target[8:-1]] = pid
        except OSError:
            pass  # it has ended, or has closed the descriptor
    found = []
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in owners:
                address, port = words[1].split(":")
                found.append((int(port, 16), address, owners[words[9]]))
    return found


class Training(threading.Thread):
    """A training with two ranks; watches their ports and their memory."""

    def __init__(self, reprise, folder, steps):
        super().__init__()
        self.out = folder
        self.log = open(f"{folder}.log", "w+")
        self.process = subprocess.Popen(
            [reprise, "launch", "-n", "2", "--", "train", *FLAGS, "--steps", str(steps),
             "--out", folder], stdout=subprocess.DEVNULL, stderr=self.log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"})
        self.began = time.monotonic()
        self.peak = 0
        self.store = None  # its port
        self.others = set()  # ports of Gloo
        self.addresses = set()
        self.on_port = lambda port: None
        self.start()

    def ranks(self):
        try:
            text = pathlib.Path(
                f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except OSError:
            return []
        return [int(word) for word in text.split()]

    def run(self):
        while self.process.poll() is None:
            if time.monotonic() - self.began > LIMIT_S:
                self.process.kill()
            for port, address, _ in ports_of(self.ranks()):
                self.addresses.add(address)
                if self.store is None:
                    self.store = port
                if port not in self.others and port != self.store:
                    self.others.add(port)
                    self.on_port(port)
            for pid in self.ranks():
                try:
                    status = pathlib.Path(f"/proc/{pid}/status").read_text()
                    self.peak = max(self.peak, 1024 * int(re.search(r"VmPeak:\s+(\d+)", status)[1]))
                except (OSError, TypeError):
                    pass  # it has ended
            time.sleep(0.001 if time.monotonic() - self.began < 5 else 0.02)

    def wait_for_store(self):
        while self.store is None and self.process.poll() is None:
            time.sleep(0.001)

    def end(self):
        self.join()
        self.took = time.monotonic() - self.began
        self.log.seek(0)
        self.error = self.log.read()
        self.log.close()
        metrics = pathlib.Path(self.out, "metrics.jsonl")
        self.metrics = metrics.read_bytes() if metrics.exists() else None
        return self


def connect(port):
    made = socket.create_connection(("127.0.0.1", port), timeout=2)
    made.settimeout(2)
    return made


def framed(message):
    return struct.pack("<I", len(message)) + message


def own_set(key, value):
    return framed(b"\0" + struct.pack("<H", len(key)) + key + value)


def tcp_store_set(key, value):
    """What c10d's TCPStore takes for a request to set a key."""
    return b"\0" + struct.pack("<Q", len(key)) + key + struct.pack("<Q", len(value)) + value


def hello():
    return b"RPRANK01" + os.urandom(32)


FAULT_KEYS = (b"reprise//fault", b"/reprise//fault")


def one_byte(port):
    made = connect(port)
    made.sendall(os.urandom(1))
    return [made]


def hello_then_silence(port):
    made = connect(port)
    made.sendall(hello())
    return [made]


def fault(port):
    held = []
    for key in FAULT_KEYS:
        for message in (own_set(key, FAULT), tcp_store_set(key, FAULT)):
            made = connect(port)
            made.sendall(message + bytes(100))
            held.append(made)
    return held


def wrong_proof(port):
    """A handshake with a wrong proof, and a fault in the same breath."""
    made = connect(port)
    made.sendall(hello() + os.urandom(32) + own_set(FAULT_KEYS[0], FAULT))
    return [made]


def reflected_proof(port):
    """Lets the store prove to one stranger what another has to prove."""
    first, second = connect(port), connect(port)
    first.sendall(hello())
    challenge = first.recv(72, socket.MSG_WAITALL)
    second.sendall(b"RPRANK01" + challenge[8:40])
    first.sendall(second.recv(72, socket.MSG_WAITALL)[40:] + own_set(FAULT_KEYS[0], FAULT))
    return [first, second]


def gigabyte(port):
    held = []
    for claim in (framed(b"x" * 40)[4:] + struct.pack("<I", 1 << 30),
                  struct.pack("<I", 1 << 30) + b"x", b"\0" + struct.pack("<Q", 1 << 30) + b"x",
                  hello() + bytes(32) + struct.pack("<I", 1 << 30)):
        made = connect(port)
        made.sendall(claim)
        held.append(made)
    return held


def random_bytes(port):
    made = connect(port)
    made.sendall(os.urandom(random.randrange(1, 100_000)))
    return [made]


def flood(port):
    return [connect(port) for _ in range(100)]


def early_close(port):
    for _ in range(30):
        made = connect(port)
        if random.random() < 0.5:
            made.sendall(hello()[:random.randrange(1, 40)])
        if random.random() < 0.5:  # a reset instead of an end
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        made.close()
    return []


def endless(port):
    made = connect(port)
    for _ in range(64):
        made.sendall(os.urandom(1 << 16))
    return [made]


STORE_ATTACKS = [one_byte, hello_then_silence, fault, wrong_proof, reflected_proof, gigabyte,
                 random_bytes, flood, early_close, endless]
# On the ports at which Gloo connects the ranks, which exist for a moment only.
GLOO_ATTACKS = [one_byte, random_bytes, early_close, fault]


class Attacks:
    """Attacks in the background; their connections stay open until close()."""

    def __init__(self):
        self.held = []
        self.made = 0
        self.threads = []

    def begin(self, attack, port, delay_s=0.0):
        thread = threading.Thread(target=self._run, args=(attack, port, delay_s))
        thread.start()
        self.threads.append(thread)

    def _run(self, attack, port, delay_s):
        time.sleep(delay_s)
        try:
            self.held += attack(port)
        except OSError:
            pass  # refused, dropped or over: then it has done no harm either
        self.made += 1

    def close(self):
        for thread in self.threads:
            thread.join()
        for made in self.held:
            made.close()


class Campaign:
    def __init__(self, reprise, folder, seed):
        self.reprise = reprise
        self.folder = folder
        self.failures = 0
        random.seed(seed)

    def train(self, name, steps):
        return Training(self.reprise, os.path.join(self.folder, name), steps)

    def check(self, what, training, whole):
        problems = []
        if training.process.returncode != 0:
            problems.append(f"exit status {training.process.returncode}")
        if training.metrics is None or training.metrics != whole.metrics:
            problems.append("other metrics than an undisturbed training")
        if training.peak > whole.peak + MOST_MORE_MEMORY:
            problems.append(f"{(training.peak - whole.peak) >> 20} MiB more")
        if FAULT.decode() in training.error:
            problems.append("a rank believed the stranger")
        for address in training.addresses:
            if address not in ("0100007F", "00000000000000000000000001000000"):
                problems.append(f"listens at {address}")
        if problems:
            self.failures += 1
            print(f"FAILED: {what}: {', '.join(problems)}\n{training.error}", flush=True)
        return not problems

    def crowd(self):
        """Ten attacks of each sort on one training."""
        steps = 400
        whole = self.train("whole", steps).end()
        if whole.process.returncode != 0:
            print(f"FAILED: an undisturbed training\n{whole.error}")
            sys.exit(1)
        training = self.train("attacked", steps)
        attacks = Attacks()
        training.on_port = lambda port: attacks.begin(random.choice(GLOO_ATTACKS), port)
        training.wait_for_store()
        for number in range(10):
            for attack in STORE_ATTACKS:
                attacks.begin(attack, training.store, number * random.random() / 3)
        training.end()
        attacks.close()
        self.check(f"{attacks.made} attacks on one training", training, whole)
        print(f"strangers_test: {attacks.made} attacks on a training of {whole.took:.1f} s, which "
              f"then took {training.took:.1f} s; {self.failures} failures")

    def single_attacks(self, count):
        steps = 100
        whole = self.train("whole", steps).end()
        sorts = [("store", attack) for attack in STORE_ATTACKS]
        sorts += [("Gloo", attack) for attack in GLOO_ATTACKS]
        slowest, harmless, reached = 0.0, 0, 0
        for number in range(count):
            where, attack = sorts[number % len(sorts)]
            training = self.train(f"{number}", steps)
            attacks = Attacks()
            delay = random.choice((0, random.random() * whole.took))
            if where == "Gloo":
                delay = 0
                training.on_port = lambda port, a=attack, to=attacks: to.begin(a, port)
            training.wait_for_store()
            if where == "store" and training.store:
                attacks.begin(attack, training.store, delay)
            training.end()
            attacks.close()
            reached += attacks.made > 0
            slowest = max(slowest, training.took)
            harmless += self.check(f"{attack.__name__} on {where} after {delay:.2f} s", training,
                                   whole)
        print(f"strangers_test: {harmless} of {count} attacks were harmless ({reached} reached a "
              f"port); an undisturbed training took {whole.took:.1f} s, the slowest "
              f"{slowest:.1f} s")

    def foreign_server(self, says):
        """Another program holds the port: the start fails in time and names its address."""
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        held = []

        def serve():
            while True:
                try:
                    made, _ = server.accept()
                    made.sendall(says)
                    held.append(made)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        began = time.monotonic()
        ranks = [subprocess.Popen(
            [self.reprise, "train", *FLAGS, "--steps", "10", "--out", "none"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}) for rank in (0, 1)]
        errors = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
        took = time.monotonic() - began
        server.close()
        expected = [f"cannot listen at 127.0.0.1:{port}: Address already in use",
                    f"127.0.0.1:{port} is "]
        for rank, (error, text) in enumerate(zip(errors, expected)):
            if text not in error or ranks[rank].returncode != 1:
                self.failures += 1
                print(f"FAILED: foreign server, rank {rank}: no '{text}'\n{error}")
        print(f"strangers_test: a foreign server on the port is named after {took:.1f} s")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("reprise")
    parser.add_argument("--attacks", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(flags.reprise, folder, flags.seed)
        if flags.attacks:
            campaign.single_attacks(flags.attacks)
            for says in (b"", b"x", b"HTTP/1.1 400 Bad Request\r\n\r\n"):
                campaign.foreign_server(says)
        else:
            campaign.crowd()
    sys.exit(1 if campaign.failures else 0)


if __name__ == "__main__":
    main()
