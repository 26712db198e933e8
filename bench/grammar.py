"""Grammar engines side by side on this machine's CPU: `python -m bench.grammar MODEL_FOLDER [--json FILE]`.

For every schema of grammar_schemas.json: time to compile it, time of each mask over the model's vocabulary, and whether
texts drawn at random through the masks are valid by the `jsonschema` package. Then grammars meant to do harm. An engine
that is not installed is left out; only the one that the product uses is a dependency.
"""

import argparse
import importlib
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

SCHEMAS = Path(__file__).parent / "grammar_schemas.json"
TEXTS = 3
FREE_TOKENS = 40
"""After this many tokens a draw prefers whatever closes the text."""
MAX_TOKENS = 400

HOSTILE = {
    "regex of a million letters": ("regex", "(a{1000}){1000}"),
    "regex of exponential states": ("regex", "(a|b)*a(a|b){20}"),
    "regex nested counts": ("regex", "(((a{100}){100}){100}){100}"),
    "regex optional ladder": ("regex", "(a?){3000}a{3000}"),
    "schema 400 arrays deep": ("schema", '{"items":' * 400 + "{}" + "}" * 400),
    "schema of 50000 values": ("schema", json.dumps({"enum": [f"value{i}" for i in range(50_000)]})),
    "schema of 6^12 unions": (
        "schema",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"q{i}_{j}": {"type": "integer"}}} for j in range(6)]} for i in range(12)
                ]
            }
        ),
    ),
    "schema of a huge string": ("schema", '{"type":"string","minLength":999999,"maxLength":1000000}'),
}


class Walk(Protocol):
    """One text on its way through a grammar."""

    def mask(self) -> NDArray[np.bool_]:
        """[vocab]; true at an end token where the text may end."""

    def accept(self, token: int) -> None: ...


class Engine(Protocol):
    name: str

    def walk(self, kind: str, source: str) -> Walk:
        """Compile and start. Raises ValueError with the reason."""

    def text(self, tokens: list[int]) -> str: ...


class LlguidanceWalk:
    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab

    def mask(self) -> NDArray[np.bool_]:
        words = self._matcher.compute_bitmask()
        if error := self._matcher.get_error():
            raise ValueError(error)
        bits = np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")
        return bits[: self._vocab].astype(bool)

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)


class Llguidance:
    name = "llguidance"

    def __init__(self, folder: Path, vocab: int, eos: int) -> None:
        self._module = importlib.import_module("llguidance")
        self._vocab = vocab
        self._tokenizer = self._module.LLTokenizer(
            (folder / "tokenizer.json").read_text(), n_vocab=vocab, eos_token=eos
        )

    def walk(self, kind: str, source: str) -> Walk:
        make = self._module.LLMatcher
        grammar = make.grammar_from_regex(source) if kind == "regex" else make.grammar_from_json_schema(source)
        matcher = make(self._tokenizer, grammar, log_level=0)
        if error := matcher.get_error():
            raise ValueError(error.splitlines()[0])
        return LlguidanceWalk(matcher, self._vocab)

    def text(self, tokens: list[int]) -> str:
        return bytes(self._tokenizer.decode_bytes(tokens)).decode("utf-8", "replace")


class XgrammarWalk:
    def __init__(self, module: Any, compiled: Any, vocab: int) -> None:
        self._matcher = module.GrammarMatcher(compiled)
        self._bits = module.allocate_token_bitmask(1, vocab)
        self._vocab = vocab

    def mask(self) -> NDArray[np.bool_]:
        self._matcher.fill_next_token_bitmask(self._bits)
        words = self._bits.numpy().view(np.uint8)
        return np.unpackbits(words, bitorder="little")[: self._vocab].astype(bool)

    def accept(self, token: int) -> None:
        self._matcher.accept_token(token)


class Xgrammar:
    name = "xgrammar"

    def __init__(self, folder: Path, vocab: int, eos: int) -> None:
        self._module = importlib.import_module("xgrammar")
        transformers = importlib.import_module("transformers")
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
        info = self._module.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=vocab, stop_token_ids=[eos])
        self._vocab = vocab
        self._compiler = self._module.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def walk(self, kind: str, source: str) -> Walk:
        compiler = self._compiler
        try:
            if kind == "regex":
                compiled = compiler.compile_regex(source)
            else:
                compiled = compiler.compile_json_schema(source)
        except RuntimeError as error:
            raise ValueError(str(error).splitlines()[0]) from error
        return XgrammarWalk(self._module, compiled, self._vocab)

    def text(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens)
        return text


def engines(folder: Path, vocab: int, eos: int) -> Iterator[Engine]:
    for engine in (Llguidance, Xgrammar):
        if importlib.util.find_spec(engine.name):
            yield engine(folder, vocab, eos)


def draw(
    engine: Engine, walk: Walk, eos: int, closers: list[int], rng: random.Random
) -> tuple[str | None, list[float]]:
    """A random text, None where it had no end, and how long each mask took. `closers` are tried in order."""
    tokens: list[int] = []
    times_s: list[float] = []
    for _ in range(MAX_TOKENS):
        started_s = time.perf_counter()
        allowed = walk.mask()
        times_s.append(time.perf_counter() - started_s)
        if allowed[eos] and (len(tokens) >= FREE_TOKENS or rng.random() < 0.3 or allowed.sum() == 1):
            return engine.text(tokens), times_s
        allowed[eos] = False
        choices = closing(allowed, closers)[:1] if len(tokens) >= FREE_TOKENS else []
        if not choices:
            choices = np.flatnonzero(allowed).tolist()
        if not choices:
            return None, times_s
        tokens.append(rng.choice(choices))
        walk.accept(tokens[-1])
    return None, times_s


def closing(allowed: NDArray[np.bool_], closers: list[int]) -> list[int]:
    """The allowed ones of `closers`, which are a quote, brackets, digits: the quote first inside a string."""
    quote, *others = closers
    inside = all(allowed[token] for token in others)
    return [token for token in ([quote, *others] if inside else [*others, quote]) if allowed[token]]


def measure(engine: Engine, eos: int, closers: list[int], schemas: dict[str, Any]) -> dict[str, Any]:
    validator = importlib.import_module("jsonschema").Draft202012Validator
    rng = random.Random(7)
    compile_ms: list[float] = []
    mask_us: list[float] = []
    refused: dict[str, str] = {}
    invalid: dict[str, str] = {}
    endless: set[str] = set()
    for name, schema in schemas.items():
        for turn in range(TEXTS):
            started_s = time.perf_counter()
            try:
                walk = engine.walk("schema", json.dumps(schema))
            except ValueError as error:
                refused[name] = str(error)[:100]
                break
            if turn == 0:
                compile_ms.append((time.perf_counter() - started_s) * 1e3)
            text, times_s = draw(engine, walk, eos, closers, rng)
            mask_us += [s * 1e6 for s in times_s]
            if text is None:
                endless.add(name)
            elif not _valid(validator, schema, text):
                invalid[name] = text[:100]
    return {
        "engine": engine.name,
        "schemas": len(schemas),
        "refused": refused,
        "invalid": invalid,
        "endless": sorted(endless),
        "compile_ms": _summary(compile_ms),
        "mask_us": _summary(mask_us),
        "hostile": {name: _hostile(engine, *case) for name, case in HOSTILE.items()},
    }


def _valid(validator: Any, schema: Any, text: str) -> bool:
    try:
        return bool(validator(schema).is_valid(json.loads(text)))
    except ValueError:
        return False


def _hostile(engine: Engine, kind: str, source: str) -> dict[str, Any]:
    started_s = time.perf_counter()
    try:
        walk = engine.walk(kind, source)
    except ValueError as error:
        return {"compile_ms": (time.perf_counter() - started_s) * 1e3, "refused": str(error)[:60]}
    compiled_s = time.perf_counter()
    try:
        walk.mask()
    except ValueError as error:
        return {"compile_ms": (compiled_s - started_s) * 1e3, "refused": str(error)[:60]}
    return {"compile_ms": (compiled_s - started_s) * 1e3, "mask_ms": (time.perf_counter() - compiled_s) * 1e3}


def _summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "mean": statistics.fmean(ordered),
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "max": ordered[-1],
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['engine']}: {result['schemas']} schemas, {len(result['refused'])} refused, "
          f"{len(result['invalid'])} with an invalid text, {len(result['endless'])} without an end")  # fmt: skip
    for key in ("compile_ms", "mask_us"):
        print(f"  {key:12}" + "".join(f" {name} {value:9.2f}" for name, value in result[key].items()))
    for kind in ("refused", "invalid"):
        for name, reason in result[kind].items():
            print(f"  {kind}: {name}: {reason}")
    for name, figures in result["hostile"].items():
        said = ", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k}: {v}" for k, v in figures.items())
        print(f"  hostile: {name:32} {said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = json.loads((options.model / "config.json").read_text())
    eos = config["eos_token_id"]
    vocabulary = json.loads((options.model / "tokenizer.json").read_text())["model"]["vocab"]
    closers = [vocabulary[text] for text in ('"', "}", "]", "0", "a") if text in vocabulary]
    schemas = json.loads(SCHEMAS.read_text())
    results = []
    for engine in engines(options.model, config["vocab_size"], eos):
        results.append(measure(engine, eos, closers, schemas))
        show(results[-1])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
