"""Checks of the data: columns, repeated prompts, lengths, the text that the model reads, the tokens that end it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from cohort.doctor.answers import ANSWER_COLUMNS
from cohort.doctor.finding import Check, Finding, Status

REPEATED, DROPPED, EMPTY = 0.1, 0.2, 0.01
"""Shares above which repeated prompts, dropped rows and empty cells are rarely intended."""
UNKNOWN = 0.01
"""Share of the prompts' tokens that the tokenizer does not know."""
TEXTLESS = 1e-3
"""Share of drawn tokens that are of no text. A trained model draws none."""
MAX_SHOWN = 60


def check_columns(
    columns: Sequence[str],
    reads: Mapping[str, Sequence[str]],
    unfilled: Mapping[str, Sequence[str]],
    values: Mapping[str, Sequence[Sequence[object]]],
) -> list[Finding]:
    """Which columns the reward functions read, and whether they hold something.

    Args:
        columns: of the data.
        reads: names of the columns that each function names.
        unfilled: of each function, parameters with a default for which there is no column.
        values: of each column that a function names, the first values in each source of rows. A source without any is
            one that the column is not for, unless no source has any.
    """
    check, read = Check("columns"), dict.fromkeys(column for some in reads.values() for column in some)
    for name, parameters in unfilled.items():
        for parameter in parameters:
            if close := difflib.get_close_matches(parameter, [c for c in columns if c not in reads[name]], 1, 0.75):
                check.warn(
                    f"reward function {name} has a parameter {parameter!r}, and the data has {close[0]!r}: the "
                    "function always gets its default",
                    f'rename one of them, as in data.columns = {{ {parameter} = "{close[0]}" }}',
                )
    for column in read:
        names = ", ".join(name for name, some in reads.items() if column in some)
        sources = [cells for cells in values.get(column, ()) if cells]
        sources = [cells for cells in sources if not all(map(_is_empty, cells))] or sources
        partly = [cells for cells in sources if sum(map(_is_empty, cells)) > EMPTY * len(cells)]
        cells = [cell for source in sources for cell in source]
        if partly:
            empty = sum(_is_empty(cell) for cells in partly for cell in cells)
            check.warn(
                f"column {column!r}, which {names} reads, is empty in {empty:,} of {sum(map(len, partly)):,} rows",
                f"leave such rows out with data.filter, or let {names} return None for them",
            )
        elif column in ANSWER_COLUMNS and len(cells) > 1 and isinstance(cells[0], str) and len({*map(str, cells)}) == 1:
            check.warn(
                f"column {column!r}, which {names} reads, is {cells[0][:MAX_SHOWN]!r} in each of {len(cells):,} rows",
                "look at the data; data.columns renames columns",
            )
    words = [f"{name} reads {', '.join(some) or 'no column'}" for name, some in reads.items()]
    return check.findings(f"the data has {', '.join(columns)}; {'; '.join(words)}")


def _is_empty(cell: object) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())


def check_prompts(keys: Sequence[int], held_out: Mapping[str, Sequence[int]]) -> list[Finding]:
    """Repeated prompts, and evaluation prompts that are also trained on.

    Args:
        keys: a number for each prompt of the training data, equal for equal prompts.
        held_out: likewise for each evaluation set.
    """
    known = set(keys)
    repeated = len(keys) - len(known)
    check = Check("prompts", {"prompts": len(keys), "repeated": repeated})
    if repeated > REPEATED * len(keys):
        check.warn(
            f"{repeated:,} of {len(keys):,} prompts are repeated: as token ids, only {len(known):,} differ",
            "if that is not intended, look at data.prompt_column or data.prompt_template, or remove the repetitions",
        )
    for name, others in held_out.items():
        if both := sum(key in known for key in others):
            check.warn(
                f"{both:,} of the {len(others):,} evaluation prompts{f' of {name}' if name else ''} are also training "
                "prompts: the evaluation measures memory too",
                "remove them from the training data with data.filter or data.select",
            )
    return check.findings(f"{len(keys):,} prompts, {len(known):,} of them different")


def check_lengths(
    longest: int, completion: int, context: int | None, *, prompts: int, dropped: int, truncated: int
) -> list[Finding]:
    """The longest prompt against the model's context, and what ``data.overlong_prompts`` did.

    Args:
        longest: tokens of the longest prompt.
        completion: maximum number of tokens of a completion.
        context: the model's context; None: no limit.
        prompts: number of prompts that are left.
        dropped: prompts left out for their length.
        truncated: prompts of which the last tokens are kept.
    """
    check = Check("lengths", {"longest_prompt": longest, "completion": completion, "context": context})
    if truncated:
        check.warn(
            f"{truncated:,} of {prompts:,} prompts are cut to their last tokens, so the model does not see how they "
            "begin",
            "raise data.max_prompt_length, or set data.overlong_prompts to 'drop'",
        )
    if dropped > DROPPED * (prompts + dropped):
        check.warn(
            f"{dropped:,} of {prompts + dropped:,} prompts are dropped because they are too long",
            "raise data.max_prompt_length, or lower rollout.max_completion_length",
        )
    whole = "without a limit" if context is None else f"of {context:,}"
    return check.findings(
        f"the longest prompt has {longest:,} tokens; with a completion of {completion:,}: {longest + completion:,}, in "
        f"a context {whole}"
    )


def check_text(
    first: str,
    lost: Sequence[str],
    *,
    raw_for_chat: bool,
    doubled_start: str = "",
    appended_end: str = "",
    spelt: tuple[int, str] = (0, ""),
    unknown_tokens: int = 0,
    tokens: int = 1,
) -> list[Finding]:
    """What the model reads. The first prompt is shown beside every problem.

    Args:
        first: the first prompt, decoded with its special tokens.
        lost: texts of messages that are not in their decoded prompt.
        raw_for_chat: whether prompts are plain text, the format was left to Cohort, and the model has a chat template.
        doubled_start: the start token that prompts begin with twice.
        appended_end: the end token that the tokenizer puts after prompts of text.
        spelt: number of rows whose messages spell control tokens of the chat template, and the first one.
        unknown_tokens: unknown tokens in some prompts.
        tokens: tokens of these prompts.
    """
    check = Check("text", {"unknown_tokens": unknown_tokens, "lost": len(lost), "spelt": spelt[0]})
    if raw_for_chat:
        check.warn(
            "the prompts are plain text, and the model has a chat template: it reads them without the turns that it "
            "was trained on",
            "set data.format to 'chat', or to 'text' if plain text is intended",
        )
    if doubled_start:
        check.warn(
            f"prompts begin with {doubled_start!r} twice: the text contains it, and the tokenizer adds it",
            f"remove {doubled_start!r} from the prompts",
        )
    if appended_end:
        check.warn(
            f"the tokenizer puts {appended_end!r} after every prompt: the model completes a text that has ended",
            "set add_eos_token to false in tokenizer_config.json, or data.format to 'chat'",
        )
    if spelt[0]:
        rows = "row spells" if spelt[0] == 1 else "rows spell"
        check.warn(
            f"messages of {spelt[0]:,} {rows} control tokens of the chat template ({spelt[1]}): their text ends its "
            "turn and may go on as another speaker",
            "set data.escape_control_tokens to true, which reads them as plain text; or clean the data",
        )
    if lost:
        check.warn(
            f"a message is not in its decoded prompt as it was written: {lost[0][:MAX_SHOWN]!r}. The chat template or "
            "the tokenizer changes it",
            "compare it with the first prompt below; set data.chat_template, or clean the data",
        )
    if unknown_tokens > UNKNOWN * tokens:
        check.warn(
            f"{unknown_tokens / tokens:.0%} of the prompts' tokens are the unknown token",
            "use the tokenizer that the model was trained with; if this is it, the model cannot read this text: use "
            "other data, or another model",
        )
    return [*check.findings(first), *([Finding("text", Status.PASS, first)] if check.has_problems else [])]


def check_ends(
    ends: Mapping[int, str],
    turn_end: tuple[int, str] | None,
    *,
    other_ends: bool,
    longest: int,
    pad: str | None,
    sizes: tuple[int, int],
    textless: tuple[int, float] = (0, 0.0),
) -> list[Finding]:
    """Tokens that end a completion, the pad token, and the size of the vocabulary.

    Args:
        ends: end tokens by id.
        turn_end: the special token with which the chat template ends the assistant's turn, if there is one.
        other_ends: whether a stop string or a grammar ends completions.
        longest: maximum number of tokens of a completion.
        pad: the pad token.
        sizes: number of tokens that the tokenizer and that the model knows.
        textless: number of the model's tokens that are of no text, and the probability that one of them is drawn.
    """
    check = Check("ends", {"textless": textless[0], "textless_share": textless[1]})
    names = ", ".join(f"{token!r} ({number})" for number, token in ends.items())
    if not ends and not other_ends:
        check.warn(
            f"neither the model nor the tokenizer names an end token: every completion runs to {longest:,} tokens",
            "set eos_token_id in the model's generation_config.json, or rollout.stop",
        )
    elif turn_end is not None and turn_end[0] not in ends and not other_ends:
        check.warn(
            f"the chat template ends the assistant's turn with {turn_end[1]!r} ({turn_end[0]}), which is not an end "
            f"token; end tokens: {names}. Completions run on after their end",
            f"add {turn_end[0]} to eos_token_id in the model's generation_config.json, or set rollout.stop to "
            f"[{turn_end[1]!r}]",
        )
    if sizes[0] > sizes[1]:
        check.warn(
            f"the tokenizer has {sizes[0]:,} tokens and the model {sizes[1]:,}: a text with one of the others, as of a "
            "tool, stops the run",
            "resize the model's embeddings, or use its own tokenizer",
        )
    if textless[1] > TEXTLESS:
        check.warn(
            f"{textless[0]:,} of the model's {sizes[1]:,} tokens are of no text, and {textless[1]:.1%} of what it "
            "draws are such tokens: completions have less text than tokens",
            f"a new model: give it {sizes[0]:,} tokens, by vocab_size in its config or model.resize_token_embeddings",
        )
    padding = "no pad token" if pad is None else f"pad token {pad!r}"
    return check.findings(f"end tokens {names or 'none'}; {padding}, which is not needed: nothing is padded")
