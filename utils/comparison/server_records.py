"""JSON records of servers' runs, one line per answer. They contain neither API keys nor names of their variables."""

from typing import Any

from utils.comparison.records import SCHEMA, circumstances
from utils.comparison.server_runs import ComparedServer, ServerPrompt, ServerRun
from utils.prompts.conversation import to_messages
from utils.servers.address import ServerAddress
from utils.servers.kinds.completion import Chat

SERVER_GENERATION = "server_generation"
SERVER = "server"  # the field with the server's name


def server_records(prompt: ServerPrompt, pair: Any) -> list[dict[str, Any]]:
    """One record for each answer. pair: the loaded models, or None."""
    return [_record(prompt, compared) | circumstances(pair, prompt.settings) for compared in prompt.compared]


def _record(prompt: ServerPrompt, compared: ComparedServer) -> dict[str, Any]:
    run, comparison = compared
    completion, history = run.answer.completion, prompt.histories[run.name]
    ids = completion.token_ids
    return {
        "schema": SCHEMA,
        "record": SERVER_GENERATION,
        "prompt": prompt.text,
        "turn": len(history),
        "history": to_messages(history),
        "strategy": run.name,
        SERVER: server_figures(run),
        "text": run.text,
        "token_ids": None if ids is None else list(ids),
        "prompt_tokens": completion.prompt_tokens,
        "new_tokens": run.new_tokens,
        "tokens_counted_by": completion.counted_by.value,
        "finish": run.finish.value,
        "finish_reason": completion.finish_reason,
        "seconds": run.seconds,
        "first_token_seconds": run.first_seconds,
        "tokens_per_second": run.tokens_per_second,
        "decode_tokens_per_second": run.decode_tokens_per_second,
        **acceptance_figures(run),
        "baseline": comparison.baseline,
        "speedup_vs_baseline": comparison.speedup,
        "decode_speedup_vs_baseline": comparison.decode_speedup,
        "same_as_baseline": comparison.same,
        "first_difference": comparison.first_difference,
        "first_difference_in": f"{comparison.unit}s",
    }


def server_figures(run: ServerRun) -> dict[str, Any]:
    """Which server answered, and the form of its prompt."""
    prompt = run.answer.request.prompt
    form = "messages" if isinstance(prompt, Chat) else "text" if isinstance(prompt, str) else "token ids"
    return address_figures(run.address) | {
        "model": run.answer.model,
        "engine": run.answer.kind,
        "prompt_form": form,
    }


def address_figures(address: ServerAddress) -> dict[str, Any]:
    """A server's name and address, without its key."""
    return {"name": address.name, "url": address.url, "baseline": address.baseline}


def acceptance_figures(run: ServerRun) -> dict[str, Any]:
    """The server's draft figures. They are null unless they belong to this request alone."""
    found = run.answer.acceptance
    return {
        "drafted": run.drafted,
        "accepted": run.accepted,
        "acceptance_rate": run.acceptance_rate,
        "rounds": run.rounds,
        "tokens_per_target_forward": run.tokens_per_target_forward,
        "accepted_by_position": [list(pair) for pair in found.by_position] if found and found.valid else None,
        "acceptance_is_valid": None if found is None else found.valid,
        "acceptance_note": "" if found is None else found.note,
    }
