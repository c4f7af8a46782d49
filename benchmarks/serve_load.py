"""Many clients of `longspan serve` at once, against one client at a time.

    python benchmarks/serve_load.py RUN --clients 32 --seconds 60

The server and the clients are processes of their own. Each client streams one request after the other, with
its own prompts and seeds, over a plain socket. Then the first request of every client is sent again, alone:
the text must be the same. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import http.client
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SPARE_SECONDS = 120.0  # beyond the planned time of a phase
_EVENT = re.compile(rb"data: (.*?)\n\n", re.DOTALL)


@dataclass(frozen=True)
class Plan:
    """What the clients do."""

    host: str
    model: str
    vocabulary: int
    clients: int
    seconds: float
    tokens: int
    prompt_tokens: int
    alone: bool  # only the first request of every client, one after the other


@dataclass
class Reply:
    """One request: when events came, in seconds after it was sent, and their texts."""

    client: int
    number: int
    status: int
    complete: bool
    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least `part` (0 to 1) of all values do not exceed; nan without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    rank = -(-part * len(ordered) // 1)  # rounded up
    return ordered[max(0, int(rank) - 1)]


def gaps(times: Sequence[float]) -> list[float]:
    """Between events that follow each other."""
    return [after - before for before, after in itertools.pairwise(times)]


def summary(replies: Sequence[Reply], tokens: int, seconds: float) -> dict[str, float]:
    """Times in milliseconds, and tokens per second."""
    first = [one.times[0] for one in replies if one.times]
    between = [gap for one in replies for gap in gaps(one.times)]
    return {
        "requests": len(replies),
        "errors": sum(one.status != 200 for one in replies),
        "first_p50_ms": percentile(first, 0.5) * 1000,
        "first_p99_ms": percentile(first, 0.99) * 1000,
        "between_p50_ms": percentile(between, 0.5) * 1000,
        "between_p99_ms": percentile(between, 0.99) * 1000,
        "tokens_per_second": tokens / seconds,
    }


def differing(together: Sequence[Reply], alone: Sequence[Reply]) -> list[int]:
    """Clients whose first text is not the one that the same request gives alone, or the beginning of it."""
    firsts = {one.client: one for one in together if one.number == 0}
    found = []
    for one in alone:
        other = firsts.get(one.client)
        same = other is not None and one.complete and one.text.startswith(other.text)
        if not same or (other is not None and other.complete and other.text != one.text):
            found.append(one.client)
    return found


def parse(
    data: bytes, parts: Sequence[tuple[float, int]], began: float
) -> tuple[list[float], list[str], bool]:
    """Times and texts of the events of a response, and whether it was complete.

    `parts` are the times at which bytes arrived, with the number of bytes until then.
    """
    ends = [end for _, end in parts]
    # Sizes of chunks of the transfer encoding may stand between events, and are not part of them.
    times, texts, complete = [], [], False
    for event in _EVENT.finditer(data):
        if event[1] == b"[DONE]":
            complete = True
            continue
        content = json.loads(event[1])
        for choice in content.get("choices", ()):
            times.append(parts[bisect.bisect_left(ends, event.end())][0] - began)
            texts.append(choice["text"])
    return times, texts, complete


class Connection(asyncio.Protocol):
    """Collects what arrives, and does nothing else: the client must not be slower than the server."""

    def __init__(self) -> None:
        self.parts: list[tuple[float, int]] = []
        self.data = bytearray()
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.parts.append((time.perf_counter(), len(self.data)))
        if b"[DONE]" in self.data[-64:] or self.data.startswith(b"HTTP/1.1 4") or self.data[9:10] == b"5":
            self.ended.set()

    def connection_lost(self, problem: Exception | None) -> None:
        self.ended.set()


def request(plan: Plan, client: int, number: int) -> bytes:
    """The request of a client; every one has its own prompt and seed."""
    seed = client * 100_000 + number
    draw = random.Random(seed)
    body = {
        "model": plan.model,
        "prompt": [draw.randrange(plan.vocabulary) for _ in range(plan.prompt_tokens)],
        "max_tokens": plan.tokens,
        "seed": seed,
        "stream": True,
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {plan.host}\r\nContent-Type: application/json\r\n"
    key = os.environ.get("LONGSPAN_API_KEY")
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def ask(plan: Plan, client: int, number: int, seconds: float) -> Reply:
    """Send one request and read the answer for at most so long."""
    host, port = plan.host.rsplit(":", 1)
    loop = asyncio.get_running_loop()
    transport, connection = await loop.create_connection(Connection, host.strip("[]"), int(port))
    began = time.perf_counter()
    transport.write(request(plan, client, number))
    try:
        await asyncio.wait_for(connection.ended.wait(), max(0.01, seconds))
    except asyncio.TimeoutError:
        pass
    finally:
        transport.close()
    data = bytes(connection.data)
    times, texts, complete = parse(data, connection.parts, began)
    status = int(data[9:12]) if len(data) > 12 else 0
    cut = not complete and not texts and status in (0, 200)  # the time was over before the first token
    return Reply(client, number, 200 if cut else status, complete, times, texts)


async def run_clients(plan: Plan) -> list[Reply]:
    """All requests of a phase."""
    end = time.perf_counter() + plan.seconds
    if plan.alone:
        found = []
        for client in range(plan.clients):
            if (left := end - time.perf_counter()) > 0:
                found.append(await ask(plan, client, 0, left))
        return [one for one in found if one.complete]

    async def one_client(client: int) -> list[Reply]:
        found: list[Reply] = []
        while (left := end - time.perf_counter()) > 0:
            found.append(await ask(plan, client, len(found), left))
            if found[-1].status != 200:
                await asyncio.sleep(0.1)
        return found

    return [one for many in await asyncio.gather(*map(one_client, range(plan.clients))) for one in many]


def phase(plan: Plan) -> tuple[list[Reply], dict[str, float]]:
    """Run the clients in a process of their own; tokens are counted by the server."""
    before = tokens_generated(plan.host)
    done = subprocess.run(
        [sys.executable, __file__, "--as-clients"],
        input=json.dumps(asdict(plan)),
        capture_output=True,
        text=True,
        timeout=plan.seconds + SPARE_SECONDS,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    answer = json.loads(done.stdout)
    tokens = tokens_generated(plan.host) - before
    replies = [Reply(**one) for one in answer["replies"]]
    return replies, summary(replies, tokens, answer["seconds"])


def as_clients() -> None:
    """The process of the clients: a plan on standard input, replies on standard output."""
    plan = Plan(**json.load(sys.stdin))
    began = time.perf_counter()
    replies = asyncio.run(run_clients(plan))
    seconds = min(time.perf_counter() - began, plan.seconds)
    json.dump({"seconds": seconds, "replies": [asdict(one) for one in replies]}, sys.stdout)


def get(host: str, path: str) -> str:
    connection = http.client.HTTPConnection(host, timeout=30)
    key = os.environ.get("LONGSPAN_API_KEY")
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def tokens_generated(host: str) -> int:
    found = re.findall(r"^longspan_tokens_generated_total\S* (\S+)$", get(host, "/metrics"), re.MULTILINE)
    return int(sum(map(float, found)))


def start_server(args: argparse.Namespace) -> tuple[subprocess.Popen[str], str]:
    """The process and its host and port, once it is ready."""
    command = [sys.executable, "-m", "longspan", "serve", args.run, "--port", "0", "--device", args.device]
    command += ["--grace", "0"] + (["--slots", str(args.slots)] if args.slots else [])
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = server.stdout.readline()  # it ends if the server fails
    found = re.search(r"http://(\S+)", line)
    if found is None:
        server.kill()
        raise SystemExit("the server did not start")
    return server, found[1]


def measure(args: argparse.Namespace, host: str) -> dict[str, Any]:
    model = json.loads(get(host, "/v1/models"))["data"][0]
    plan = Plan(
        host=host,
        model=model["id"],
        vocabulary=model["vocabulary_size"],
        clients=args.clients,
        seconds=args.seconds,
        tokens=args.tokens,
        prompt_tokens=args.prompt_tokens,
        alone=False,
    )
    warm_up = Plan(**{**asdict(plan), "seconds": args.warm_up})
    phase(warm_up)
    together, many = phase(plan)
    alone, one = phase(Plan(**{**asdict(plan), "alone": True}))
    return {
        "run": args.run,
        "device": args.device,
        "parameters": model["parameters"],
        "clients": args.clients,
        "seconds": args.seconds,
        "tokens_per_request": args.tokens,
        "prompt_tokens": args.prompt_tokens,
        "together": many,
        "alone": one,
        "ratio": many["tokens_per_second"] / one["tokens_per_second"] if one["tokens_per_second"] else None,
        "compared": len(alone),
        "different": differing(together, alone),
    }


def table(found: dict[str, Any]) -> str:
    rows = [("", f"{found['clients']} clients", "1 client")]
    for name in found["together"]:
        rows.append((name, f"{found['together'][name]:.1f}", f"{found['alone'][name]:.1f}"))
    rows.append(("ratio of tokens per second", f"{found['ratio'] or 0:.2f}", ""))
    rows.append(("texts that differ", f"{len(found['different'])} of {found['compared']}", ""))
    return "\n".join(f"{name:<28}{many:>14}{one:>14}" for name, many, one in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", nargs="?", help="a run folder")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the two phases")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds before them")
    parser.add_argument("--tokens", type=int, default=200, help="of each request")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--as-clients", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_clients:
        as_clients()
        return
    if args.run is None or args.clients < 1 or not 0 < args.seconds <= 3600 or args.tokens < 1:
        parser.error("give a RUN, at least one client and token, and at most 3600 seconds")
    server, host = start_server(args)
    try:
        found = measure(args, host)
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
    print(table(found))
    print(json.dumps(found))
    if found["different"] or found["together"]["errors"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
