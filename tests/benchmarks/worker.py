"""A process that runs one peer: `worker.py generate TARGET ASSISTANT DTYPE`, `worker.py transformers FOLDER DTYPE` (the
same without anything of this program) or `worker.py llama.cpp FILE`.

A peer has a process of its own because its environment decides how its threads wait, and users of transformers or of
llama.cpp do not run it in ours. Requests and replies are lines of JSON on standard input and output.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

ROOT = Path(__file__).parent.parent.parent
DRAFTS = 10  # maximum drafts per round of prompt lookup, as many as ours
# Tokens whose last earlier occurrence llama.cpp's n-gram drafts continue. Its default of 12 rarely finds one.
LLAMA_NGRAM = 3
CONTEXT = 8192  # tokens, the context length of the embedded model
FORCED = 1000.0  # added to a token's logit, so that the server samples it and reports its probability

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def serve(handlers: dict[str, Handler], requests: Iterable[str], replies: TextIO) -> None:
    """Answer requests, each of which names its handler as "arm", until there are no more."""
    for line in requests:
        request = json.loads(line)
        try:
            reply = handlers[request["arm"]](request)
        except Exception as error:  # whatever a peer raises is reported by the benchmark
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def generate_handlers(pair: Any) -> dict[str, Handler]:
    """transformers' plain decoding and prompt lookup, and assisted decoding if the drafter is a model."""
    arms = {"plain": {}, "lookup": {"prompt_lookup_num_tokens": DRAFTS}}
    if hasattr(pair.drafter, "generate"):
        arms["assistant"] = {"assistant_model": pair.drafter}
    return {name: _generate(pair, arguments) for name, arguments in arms.items()}


def _generate(pair: Any, arguments: dict[str, Any]) -> Handler:
    import torch
    from transformers import StoppingCriteriaList

    from utils.models.load_errors import quiet

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(request["threads"])
        ids = request["ids"]
        prompt, first = torch.tensor([ids]), []

        def watch(input_ids: Any, scores: Any, **ignored: Any) -> Any:
            """Never stop; record the time of the first tokens and the length of the text then."""
            first[:] = first or [time.perf_counter(), input_ids.shape[1]]
            return torch.zeros(len(input_ids), dtype=torch.bool)

        with quiet():
            started = time.perf_counter()
            text = pair.target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request["length"],
                do_sample=False,
                eos_token_id=sorted(pair.end_ids),
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([watch]),
                **arguments,
            )[0].tolist()
            seconds = time.perf_counter() - started
        tokens = text[len(ids) :]
        return {
            "count": len(tokens),
            "seconds": seconds,
            "first": first[1] - len(ids),
            "first_seconds": first[0] - started,
            "tokens": tokens,
        }

    return handle


def llama_handlers(start: Callable[[int, bool], Any]) -> dict[str, Handler]:
    """llama.cpp's plain decoding, prompt lookup and perplexity. start(threads, lookup): a server."""
    servers: dict[bool, tuple[int, Any]] = {}

    def answer(request: dict[str, Any], lookup: bool, **arguments: Any) -> Any:
        count = request["threads"]
        if servers.get(lookup, (0, None))[0] != count:
            servers.pop(lookup, None)  # two at a time need twice the memory
            servers[lookup] = count, start(count, lookup)
        reply = servers[lookup][1].handle_completions({"temperature": 0, "cache_prompt": False} | arguments)
        return json.loads(reply) if isinstance(reply, str | bytes) else reply

    def run(request: dict[str, Any], lookup: bool) -> dict[str, Any]:
        reply = answer(request, lookup, prompt=request["ids"], n_predict=request["length"])
        times = reply["timings"]
        first = times["prompt_ms"] / 1000  # its first token comes from the prompt's last row
        return {
            "count": times["predicted_n"],
            "seconds": first + times["predicted_ms"] / 1000,
            "first": 1,
            "first_seconds": first,
            "text": reply["choices"][0]["text"],
        }

    def perplexity(request: dict[str, Any]) -> dict[str, Any]:
        ids, total = request["ids"], 0.0
        for index in range(1, len(ids)):
            bias = [[ids[index], FORCED]]  # the reported probability is that before the bias
            arguments = {"n_predict": 1, "logprobs": 1, "logit_bias": bias, "cache_prompt": True}
            reply = answer(request, False, prompt=ids[:index], **arguments)
            token = reply["choices"][0]["logprobs"]["content"][0]
            if token["id"] != ids[index]:
                raise RuntimeError(f"llama.cpp sampled {token['id']} instead of {ids[index]}")
            total -= token["logprob"]
        return {"perplexity": math.exp(total / (len(ids) - 1))}

    return {
        "plain": lambda request: run(request, False),
        "lookup": lambda request: run(request, True),
        "perplexity": perplexity,
    }


def _llama_server(file: str) -> Callable[[int, bool], Any]:
    import xllamacpp

    def start(count: int, lookup: bool) -> Any:
        options = xllamacpp.CommonParams()
        options.model.path, options.n_ctx, options.n_parallel, options.warmup = file, CONTEXT, 1, True
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = count
        options.n_gpu_layers, options.cache_ram_mib, options.verbosity = 0, 0, -1
        if lookup:
            options.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            options.speculative.ngram_simple.size_n, options.speculative.ngram_simple.size_m = LLAMA_NGRAM, DRAFTS
        return xllamacpp.Server(options)

    return start


def _transformers_model(folder: str, dtype: str) -> Any:
    """A model as transformers loads it, in the place of a pair. It has no end token, so that texts have full length."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return SimpleNamespace(target=model, drafter=None, end_ids=[-1])


def main() -> None:
    """Serve the peer that the command line names."""
    kind, *arguments = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not write among the replies
    if kind == "llama.cpp":
        handlers = llama_handlers(_llama_server(*arguments))
    elif kind == "transformers":
        sys.path.insert(0, str(ROOT))
        handlers = generate_handlers(_transformers_model(*arguments))
    else:
        sys.path.insert(0, str(ROOT))
        from utils.pairs.load_pair import load_pair
        from utils.pairs.request import PairRequest

        target, assistant, dtype = arguments
        request = PairRequest(target, assistant, device="cpu", dtype=dtype)
        handlers = generate_handlers(load_pair(request, lambda line: None))
    serve(handlers, sys.stdin, replies)


if __name__ == "__main__":
    main()
