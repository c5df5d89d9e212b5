"""loading/options.py: one declaration of every option for the command lines, the benchmark and Python."""

import argparse
import json
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
from tiny import one_line

import kernels
from decoding.params import SUGGESTED, SamplingParams, with_suggestions
from families.config import DTYPES
from loading import options
from loading.drafting import (
    BY_PRICE,
    default_tree,
    find_tuned_tree,
    resolve,
    tree_shape,
    tuned_path,
    with_tree,
    with_window,
)
from loading.options import DEMO, LoadOptions
from support.errors import UsageError
from tree import NAMES, parse_tree
from weights.checkpoint import Checkpoint
from weights.head_reader import read_eagle
from weights.heads import EagleConfig
from weights.quantized import MODES

# field -> (what a user types after the flag, the value of the field); none is a default
TEXTS = """checkpoint=models/x sha256=stored device=cpu dtype=bfloat16 quant=int4 lora=models/l compile_mode=blocks
    activations=float kernels=reference kv=int8 eagle=heads/e head_quant=none drafter=eagle draft_checkpoint=models/d
    medusa=m.pt tree=chain:3 draft_window=96 draft_vocab_text=t.txt verify=multi-round"""
COUNTS = "slots=3 ctx=256 pool=600 threads=3 tp=2 ngram_nodes=7 prune=5 draft_vocab=64"
TYPED = {name: (word, word) for name, word in (item.split("=") for item in TEXTS.split())}
TYPED |= {name: (word, int(word)) for name, word in (item.split("=") for item in COUNTS.split())}
TYPED |= {name: (None, True) for name in ("compile", "check", "eagle_always")}
TYPED |= {"draft_noise": ("off", False), "eagle_config": ("rope_theta=1e4", ("rope_theta=1e4",))}
DECLARED = {f.name: f for f in fields(LoadOptions)}
NUMBERS = [name for name, f in DECLARED.items() if f.metadata["least"] is not None]
SWITCHES = [name for name, f in DECLARED.items() if isinstance(f.default, bool)]
CHOICES = [name for name, f in DECLARED.items() if f.metadata["choices"] and name not in SWITCHES]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def typed(name: str) -> list[str]:
    """The words of a command line that give this option its value of TYPED."""
    word = TYPED[name][0]
    return [flag(name)] if word is None else [flag(name), word]


def parsed(*words: str, names: tuple[str, ...] = (), **defaults) -> dict:
    parser = argparse.ArgumentParser()
    options.add_options(parser, *names, **defaults)
    return options.options_from(parser.parse_args(words), *names)


def test_every_option_is_declared_with_its_flag_and_its_help():
    """A field that the command line does not have, or that --help does not explain."""
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    arguments = {a.dest: a for a in parser._actions if a.dest != "help"}
    assert list(arguments) == list(DECLARED) and TYPED.keys() == arguments.keys()
    for name, f in DECLARED.items():
        assert arguments[name].option_strings == [flag(name)] and len(f.metadata["help"]) > 10
        assert f.default is not MISSING and list(arguments[name].choices or ()) == list(f.metadata["choices"])
    text = parser.format_help()
    assert text.count("model:") == text.count("speculative decoding:") == 1


def test_all_options_come_back_together():
    """An option that is dropped, changes its type, spoils another one or lands in its field; a repeatable one that keeps
    its last value only."""
    assert all(value != getattr(LoadOptions(), name) for name, (_, value) in TYPED.items())
    words = [word for name in TYPED for word in typed(name)]
    found = parsed(*words, "--eagle-config", "rms_norm_eps=1e-5")
    assert found.pop("eagle_config") == ("rope_theta=1e4", "rms_norm_eps=1e-5")
    assert found == {name: value for name, (_, value) in TYPED.items() if name != "eagle_config"}
    assert all(type(value) is type(TYPED[name][1]) for name, value in found.items())


def test_a_command_may_have_some_options_and_defaults_of_its_own():
    """A command that offers options it ignores, or whose default is not the one that it runs with or that Python has."""
    assert LoadOptions(**parsed()) == LoadOptions()
    names = ("dtype", "ctx", "draft_noise", "compile", "eagle_config")
    mine = {"dtype": "float32", "ctx": 512, "draft_noise": False, "compile": True, "eagle_config": ("a=1",)}
    assert parsed(names=names, **mine) == mine
    assert parsed("--ctx", "64", "--draft-noise", "on", names=names, **mine) == mine | {"ctx": 64, "draft_noise": True}
    with pytest.raises(SystemExit):
        parsed("--kv", "int8", names=names)


@pytest.mark.parametrize("name", TYPED)
def test_read_option_reads_what_an_arm_of_the_benchmark_says(name):
    """An arm that measures another value than the one in its name; `compile=yes` or `ctx=1e3` taken for something."""
    word, value = TYPED[name]
    assert options.read_option(name, "on" if word is None else word) == value
    if name not in (*NUMBERS, *SWITCHES):
        return
    for text in ("", "yes", "True", "-1", "1.5", "1e3"):
        one_line(lambda text=text: options.read_option(name, text), f"{name}={text!r}; allowed: ", kind=UsageError)


@pytest.mark.parametrize("name", (*NUMBERS, *CHOICES, *SWITCHES))
def test_wrong_values_are_answered_with_the_right_ones(name):
    """A number that is too small, or a text or a truth value used as one; a misspelt name that is another default, or a
    KeyError; `draft_noise="off"`, which Python takes for true."""
    default, about = DECLARED[name].default, DECLARED[name].metadata
    least, most = about["least"], about["most"]
    if name in NUMBERS:
        wrong = [least - 1, -(10**9), "4", 2.0, True, [4], None, most and most + 1]
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
    elif name in SWITCHES:
        wrong, allowed = ["off", "on", 1, 0, None], "True or False"
    else:
        wrong, allowed = ["bogus", "" if default else "x", 1, True, ["cpu"]], ", ".join(about["choices"])
    for value in wrong:
        if value is None and default is None:  # which the machine or the model decides
            continue
        said = one_line(LoadOptions(**{name: value}).validate, kind=UsageError)
        assert said.startswith(f"{flag(name)} is {value!r}; allowed: {allowed}"), said


IGNORED = [
    (dict(eagle_config=("a=1",)), "--eagle-config is about a draft head"),
    (dict(eagle_config=("a",), eagle="e"), "KEY=VALUE"),
    (dict(draft_vocab=5, drafter="ngram"), "--draft-vocab is about a draft head"),
    (dict(draft_vocab_text="t", eagle="e"), "needs --draft-vocab K"),
    (dict(verify="multi-round"), "--verify is about a draft head"),
    (dict(verify="multi-round", medusa="m"), "medusa has none"),
    (dict(draft_noise=False), "--draft-noise off is about a draft head"),
    (dict(draft_window="64", draft_checkpoint="d"), "--draft-window is about a draft head"),
    *(
        (dict(draft_window=bad, eagle="e"), f"--draft-window is {bad!r}; allowed: auto, full, 16 or more")
        for bad in ("15", "-3", "", "wide", "2.5")
    ),
    (dict(draft_window=0, eagle="e"), "--draft-window is '0'"),
    (dict(draft_window=True, eagle="e"), "--draft-window is True"),
    (dict(ngram_nodes=4), "another drafter"),
    (dict(kernels="cpu", compile=True, compile_mode="blocks"), "leave --compile-mode out"),
    (dict(compile_mode="blocks"), "nothing is compiled; add --compile"),
    (dict(device="cuda", threads=2), "--threads is about a CPU ... add --device cpu"),
    (dict(eagle="e", draft_checkpoint="d"), "--draft-checkpoint DIR does not go with the drafter eagle"),
    (dict(drafter="draft"), "--drafter draft needs --draft-checkpoint DIR"),
    (dict(kv="int8", kernels="reference", eagle="e"), "Leave out --kv int8, or the drafter (eagle)"),
    (dict(kv="float16", kernels="reference"), "--kv float16 is about the CPU kernels"),
    (dict(kv="bfloat16", device="cuda"), "--kv bfloat16 is about the CPU kernels"),
    (dict(tree=()), "--tree is"),
    (dict(tree=("paper25", None)), "--tree is"),
    (dict(eagle=5), "--eagle is"),
    (dict(medusa=["file"]), "--medusa is"),
    (dict(eagle="head", eagle_config="a=1"), "--eagle-config is"),
]


@pytest.mark.parametrize(("changes", "message"), IGNORED)
def test_options_that_are_wrong_or_would_be_ignored_are_refused(changes, message):
    """An option that is accepted and does nothing: the wrong thing measured."""
    one_line(LoadOptions(**changes).validate, *message.split(" ... "), kind=UsageError)


def test_options_that_go_together_are_accepted():
    """A check that refuses what works."""
    for changes in (
        dict(),
        dict(eagle="e", eagle_config=("a=1",), draft_vocab=5, draft_vocab_text="t", draft_noise=False, ngram_nodes=2),
        dict(draft_checkpoint="d", verify="multi-round"),
        dict(kv="int8"),
        dict(kv="int8", kernels="cpu", eagle="e"),
        dict(kv="float16", kernels="cpu"),
        dict(medusa="m", draft_noise=False, tree="medusa:mc_sim_7b_63"),
        dict(eagle="e", slots=2, tree=("paper25", "chain:2")),
    ):
        LoadOptions(**changes).validate()


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    """--device cuda that ends in a traceback of torch."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    one_line(lambda: LoadOptions(device="cuda").validate(), "--device cpu", kind=UsageError)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    LoadOptions(device="cuda").validate()


def test_shapes_of_what_is_drafted():
    """Slots, features and noise rows for another tree than the one that is drafted."""
    shapes = {
        (1, 0): dict(),
        (26, 5): dict(eagle="e"),
        (4, 3): dict(eagle="e", tree="chain:3"),
        (9, 4): dict(drafter="ngram", tree="dynamic:9,3,4"),
        (32, 6): dict(eagle="e", ngram_nodes=6),
        (5, 4): dict(eagle="e", slots=2, tree=("chain:4", "chain:2")),
    }
    for shape, changes in shapes.items():
        assert tree_shape(LoadOptions(**changes)) == shape, changes
    for changes in (dict(), dict(eagle="e")):
        one_line(lambda changes=changes: tree_shape(LoadOptions(tree="bogus", **changes)), "'bogus' is not one of")


def test_defaults_depend_on_the_model_and_the_machine(monkeypatch):
    """Half precision on a CPU that is slow with it, a context beyond the model's or of a size that nobody asked for."""
    config = replace(Checkpoint.open(DEMO).config, dtype="bfloat16")
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        monkeypatch.setattr("support.machine.default_device", lambda device=device: device)
        found = LoadOptions().with_defaults(config)
        assert (found.device, found.dtype, found.ctx) == (device, dtype, 2048)
    assert LoadOptions().with_defaults(replace(config, max_position_embeddings=100_000)).ctx == 8192
    given = LoadOptions(device="cpu", dtype="float16", ctx=77, slots=2, kv="model")
    assert given.with_defaults(config) == given
    for quick in (True, False):
        monkeypatch.setattr("kernels.multiplies_bfloat16", lambda head_dim, quick=quick: quick)
        for activations, kv in (("int8", "bfloat16" if quick else "float16"), ("float", "float16")):
            options = LoadOptions(device="cpu", kernels="cpu", activations=activations)
            assert options.with_defaults(config).kv == kv
            assert options.with_defaults(replace(config, dtype="float32")).kv == "model"


def test_resolving_decides_everything_and_refuses_what_the_model_cannot_do():
    """A context longer than the model's positions."""
    checkpoint = Checkpoint.open(DEMO)
    found = resolve(LoadOptions(tree="chain:2", eagle="e"), checkpoint)
    assert (found.tree, found.ctx) == ("chain:2", 2048) and None not in (found.device, found.dtype)
    with pytest.raises(UsageError, match=r"--ctx is 2,049; this model's limit is 2,048"):
        resolve(LoadOptions(ctx=2049), checkpoint)


def test_the_window_is_the_heads_own_or_measured_or_follows_its_positions(tmp_path):
    """A window that a config states and nobody applies, one that a user names and that a wider one of the head replaces,
    a card that is not read or that is believed whatever it says, and heads that were trained with the target."""
    own = read_eagle(DEMO / "eagle1", Checkpoint.open(DEMO).config).config

    def window(asked: str = "auto", windows=(0,), positions=2048, eagle=str(tmp_path), ctx=4096, config=own) -> str:
        layer = replace(config.layer, windows=windows, max_position_embeddings=positions)
        asked_for = LoadOptions(eagle=eagle, draft_window=asked, ctx=ctx)
        return with_window(asked_for, replace(config, layer=layer)).draft_window

    assert window() == "256" and window(positions=200) == "64" and window(positions=131_072, ctx=32_768) == "16384"
    assert window(ctx=256) == "full" == window("full") == window("8192")  # the whole context lies in the window
    assert (
        window(windows=(96,)) == "96" == window("full", (96,)) == window("512", (96,)) and window("32", (96,)) == "32"
    )
    card = tmp_path / "CARD.json"
    for measured, found in ((128, "128"), ("full", "full")):
        card.write_text(json.dumps({"window": measured}))
        assert (window(), window("64"), window(windows=(96,))) == (found, "64", "96")
    for wrong in (8, "64", True, [64], 3.5):
        card.write_text(json.dumps({"window": wrong}))
        one_line(window, "CARD.json", f"window is {wrong!r}; allowed: full, or 16 or more")
    with_target = replace(own, mtp=True)
    assert window(eagle="mtp", config=with_target) == "full" and window("64", eagle="mtp", config=with_target) == "64"
    assert with_window(LoadOptions(drafter="ngram"), None).draft_window == "full"


def test_the_tuned_tree_is_found_or_the_command_that_makes_it(tmp_path, monkeypatch):
    """A tree tuned for another model or dtype, or a hint that would tune for other options than those asked for."""
    monkeypatch.setenv("EAGLET_CACHE", str(tmp_path))
    checkpoint = Checkpoint.open(DEMO)
    head = read_eagle(DEMO / "eagle1", checkpoint.config)
    asked = LoadOptions(eagle=str(DEMO / "eagle1"), tree="auto", device="cpu")
    one_line(lambda: resolve(asked, checkpoint, None), "needs --eagle HEAD", kind=UsageError)
    said = one_line(lambda: resolve(asked, checkpoint, head), kind=UsageError)
    assert said.endswith(f"scripts.tune_tree --checkpoint {DEMO} --eagle {DEMO / 'eagle1'}")
    more = replace(asked, draft_vocab=64, draft_vocab_text="t", dtype="bfloat16", compile=True)
    with pytest.raises(UsageError, match="--draft-vocab 64 --draft-vocab-text t --dtype bfloat16 --compile$"):
        find_tuned_tree(more, checkpoint, head)
    rounded = replace(asked, quant="int4", threads=2)
    with pytest.raises(UsageError, match="--quant int4 --threads 2$"):
        resolve(rounded, rounded.open_checkpoint(), head)
    path = tuned_path(asked, checkpoint, head)
    assert path.is_relative_to(tmp_path) and path != tuned_path(more, checkpoint, head)
    path.parent.mkdir(parents=True)
    path.write_text("[[0]]")
    assert resolve(asked, checkpoint, head).tree == str(path)


# ------------------------------------------------------------------ settings of a request

FLOATS = "temperature=0.5 top_p=0.9 min_p=0.1 repetition_penalty=1.2 presence_penalty=0.3 frequency_penalty=-0.4"
INTEGERS = "top_k=7 seed=-5 max_new_tokens=9 logprobs=0 min_new_tokens=6 prompt_logprobs=2"
SETTINGS = {name: (word, float(word)) for name, word in (item.split("=") for item in FLOATS.split())}
SETTINGS |= {name: (word, int(word)) for name, word in (item.split("=") for item in INTEGERS.split())}
SETTINGS |= {
    "stop_ids": ("2,13", (2, 13)), "stop": ("END", ("END",)), "grammar": ("start: /a+/", "start: /a+/"),
    "logit_bias": ("13=-2.5", ((13, -2.5),)),
}  # fmt: skip


def sampled(*words: str, names: tuple[str, ...] = (), **defaults) -> SamplingParams:
    parser = argparse.ArgumentParser()
    options.add_sampling(parser, *names, **defaults)
    return options.sampling_from(parser.parse_args(words))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_of_a_request_comes_back_as_it_was_typed(name):
    """A setting that the command line drops or changes."""
    of_servers = {"thought", "shown_ids"}  # which need a tokenizer
    assert SETTINGS.keys() == {f.name for f in fields(SamplingParams)} - of_servers
    word, value = SETTINGS[name]
    assert sampled(f"{flag(name)}={word}") == replace(SamplingParams(), **{name: value}) != SamplingParams()


def test_settings_of_a_request_with_defaults_of_a_command():
    """A command's own default lost, or a repeated --stop that keeps the last text only."""
    assert sampled() == SamplingParams() and sampled(max_new_tokens=200).max_new_tokens == 200
    assert sampled("--stop", "a", "--stop", "b").stop == ("a", "b")
    assert sampled("--seed", "4", names=("seed",)) == SamplingParams(seed=4)
    with pytest.raises(SystemExit):
        sampled("--top-k", "4", names=("seed",))


def test_what_the_user_left_out_is_known():
    """A default that hides from a command whether its user chose it: the model's own settings could never apply."""
    parser = argparse.ArgumentParser()
    options.add_sampling(parser, of_model=True, max_new_tokens="many")
    assert options.settings_given(parser.parse_args([])) == {}
    given = options.settings_given(parser.parse_args("--top-p 1 --stop a --stop b --stop-ids 2".split()))
    assert given == {"top_p": 1.0, "stop": ["a", "b"], "stop_ids": (2,)}
    help = " ".join(parser.format_help().split())
    assert "(default: many)" in help and "(default: the model's, or else 0.0)" in help


DRAWN = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
WITHOUT_TOP_P = {"temperature", "top_k", "repetition_penalty"}
SUGGESTIONS = [  # generation_config.json, what the user gave, the settings, those of the model
    ({}, {}, {}, []),
    ({"eos_token_id": 2, "temperature": None}, {"seed": 3}, {"seed": 3}, []),
    (DRAWN, {}, {name: DRAWN[name] for name in SUGGESTED if name in DRAWN}, set(DRAWN) - {"do_sample"}),
    (DRAWN, {"top_p": 1.0}, {name: DRAWN[name] for name in WITHOUT_TOP_P}, WITHOUT_TOP_P),
    (DRAWN, {"temperature": 0.0}, {"repetition_penalty": 1.1}, {"repetition_penalty"}),
    (DRAWN | {"do_sample": False}, {}, {"repetition_penalty": 1.1}, {"repetition_penalty"}),
    ({"temperature": 0.6, "top_p": 0.9}, {}, {}, []),
    ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.5}, {"temperature": 0.5, "top_p": 0.9}, {"top_p"}),
    ({"do_sample": True}, {}, {"temperature": 1.0}, {"temperature"}),
]


@pytest.mark.parametrize(("file", "given", "settings", "names"), SUGGESTIONS)
def test_the_settings_of_the_model_fill_in_what_the_user_left_out(file, given, settings, names):
    """A flag that the model overrules, a model that samples although it says it does not, or a setting that is blamed on
    the model although it changes nothing."""
    params, found = with_suggestions(file, given)
    assert params == SamplingParams(**settings) and set(found) == set(names)


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 7}, {"top_k": -1}])
def test_a_setting_of_the_model_that_is_wrong_names_its_file(wrong):
    """An error about a flag that the user never gave."""
    said = one_line(lambda: with_suggestions({"do_sample": True} | wrong, {}))
    assert said.startswith(f"generation_config.json: {next(iter(wrong))} is ")
    with_suggestions({"do_sample": True} | wrong, {"temperature": 1.0, "top_p": 1.0, "top_k": 1})


def test_choices_are_those_of_the_rooms_they_are_from():
    """A choice that a room has learned and no command line offers, or one that is offered and refused later."""
    of_kernels = {"kernels": kernels.backend.MODES, "activations": kernels.backend.ACTIVATIONS}
    rooms = of_kernels | {"dtype": DTYPES, "quant": MODES}
    for name, choices in rooms.items():
        assert DECLARED[name].metadata["choices"] == tuple(choices), name
    assert options.TREES == NAMES


def test_ids_are_read_or_named():
    """A list of ids cut at the first thing that is none."""
    assert options.parse_ids(" 5, 17,9,") == (5, 17, 9) and options.parse_ids("") == ()
    for text in ("1,x", "1;2", "1.5", "0x10"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"^'{text}': expected comma-separated integers"):
            options.parse_ids(text)


def test_the_default_tree_on_a_gpu_is_small():
    """A tree whose verification takes several times as long as one token."""
    head = EagleConfig(3, Checkpoint.open(DEMO).config, 64)
    on_gpu = LoadOptions(device="cuda", eagle="head")
    for quantization, nodes in (("int4 (gptq)", 16), ("int8", 16), (None, 24)):
        tree = parse_tree(default_tree(on_gpu, quantization, head))
        assert tree.N == nodes and tree.depth == 7
    for other in (replace(on_gpu, verify="multi-round"), replace(on_gpu, device="cpu")):
        assert default_tree(other, "int4", head) == "paper25"


def test_a_tree_is_pruned_by_itself_only_where_that_works_and_no_tree_is_named(monkeypatch):
    """A tree that the user named and does not get, and an option that is ignored without a word."""
    monkeypatch.setattr(kernels, "cpu_problem", lambda: "")
    on_cpu = LoadOptions(device="cpu", eagle="head")

    def decided(**changes: Any) -> tuple[int, int]:
        found = with_tree(replace(on_cpu, **changes), None, None)
        return found.prune, found.ngram_nodes

    assert decided() == (BY_PRICE, options.NGRAM_NODES) and decided(ngram_nodes=3) == (BY_PRICE, 3)
    assert decided(tree="paper25") == decided(prune=0) == (0, 0)
    assert decided(tree="chain:9", prune=30) == (30, 0)
    unable = dict(compile=True, compile_mode="blocks"), dict(kernels="reference"), dict(verify="multi-round")
    for changes in (*unable, dict(dtype="bfloat16"), dict(eagle=None, drafter="ngram")):
        assert decided(**changes) == (0, 0)
        with pytest.raises(UsageError, match="--prune needs --eagle, --verify match and the C.. kernels of CPUs"):
            replace(on_cpu, prune=5, **changes).validate()
    replace(on_cpu, prune=5).validate()
    one_line(lambda: replace(on_cpu, prune=100).validate(), "--prune is 100; allowed: 0 to 99", kind=UsageError)
