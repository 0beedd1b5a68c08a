"""What an engine sees of the rollout's requests: as many as it may have at once, and no more."""

import asyncio

import orjson

from slime_core.engines.client import EngineClient
from slime_core.rollout.gate import EngineGate
from slime_core.rollout.generate import Sampling, generate
from slime_core.sample import Sample, Status

LIMIT, TOTAL, SOON_S = 8, 44, 60.0


class Engine:
    """Answers when its slots are full, all at once; counts what it holds."""

    def __init__(self) -> None:
        self.held: list[asyncio.Future[None]] = []
        self.most = self.seen = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
                body = orjson.loads(await reader.readexactly(length))
                await self._slot()
                answer = orjson.dumps([_answer(tokens) for tokens in body["input_ids"]])
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer))
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _slot(self) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.held.append(mine)
        self.seen += 1
        self.most = max(self.most, len(self.held))
        if len(self.held) >= LIMIT or self.seen == TOTAL:
            ended, self.held = self.held, []
            for one in ended:
                one.set_result(None)
        await mine


def _answer(tokens: list[int]) -> dict:
    meta = {"id": "r", "finish_reason": {"type": "stop"}, "weight_version": "l0-0"}
    return {"output_ids": tokens, "meta_info": meta | {
        "output_token_logprobs": [[-0.5, token, None] for token in tokens]}}  # fmt: skip


def test_an_engine_is_kept_full_and_never_gets_more_than_its_limit():
    engine = Engine()
    samples = [Sample(group_index=i, index=i, tokens=[i, i + 1]) for i in range(TOTAL)]

    async def body() -> None:
        server = await asyncio.start_server(engine.talk, "127.0.0.1", 0)
        gate = EngineGate(EngineClient, LIMIT)
        await gate.set_engines([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
        await gate.open()
        sampling = Sampling(16, {}, SOON_S)
        await asyncio.gather(*(generate([one], gate, sampling, lambda _: 0) for one in samples))
        await gate.aclose()
        server.close()
        await server.wait_closed()

    asyncio.run(body())
    assert engine.most == LIMIT and engine.seen == TOTAL
    for i, sample in enumerate(samples):
        assert sample.status is Status.COMPLETED and sample.tokens == [i, i + 1] * 2
