"""Record the log-probs of the engine and of the trainer on fixed prompts, for `mismatchctl gate`.

Edit MODEL, PROMPTS and ENGINE. Then run: python ci/record.py --out dumps/
"""

import argparse
import json
import math
import urllib.request

import torch
import transformers

from mismatchctl.recorder import Recorder

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"  # name or folder of the checkpoint
PROMPTS = "ci/prompts.jsonl"  # one JSON object per line: prompt_id, and prompt (text) or prompt_token_ids
ENGINE = "vllm"  # vllm, sglang, vllm=URL or sglang=URL (a running server), transformers or transformers=FOLDER

TRAINER_DTYPE = "bfloat16"  # the precision of the trainer's forward pass


def main() -> None:
    """Sample with the engine, score the same tokens with the trainer, and write one dump."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="new folder for the dump")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--prompts", default=PROMPTS)
    parser.add_argument("--engine", default=ENGINE)
    parser.add_argument("--engine-dtype", default="auto")
    parser.add_argument("--trainer-dtype", default=TRAINER_DTYPE)
    parser.add_argument("--samples", type=int, default=4, help="responses per prompt")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0, help="engine and trainer divide their logits by it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    engine, _, options.where = options.engine.partition("=")
    if engine not in ENGINES:
        parser.error(f"unknown engine {engine!r}, expected one of {', '.join(ENGINES)}")
    names, prompts = read_prompts(options)
    responses = ENGINES[engine](prompts, options)  # per prompt: a list of (token ids, log-probs)
    rows = [(name, ids, *one) for name, ids, own in zip(names, prompts, responses) for one in own if one[0]]
    wrong = next((row for row in rows if len(row[2]) != len(row[3]) or not all(map(math.isfinite, row[3]))), None)
    if wrong or not rows:
        raise SystemExit(f"the engine returned {'wrong log-probs for ' + wrong[0] if wrong else 'no tokens'}")
    model = load(options.model, options.trainer_dtype, options.device)
    with Recorder(options.out, on_error="raise") as recorder:
        recorder.write(
            step=0,
            rollout_log_probs=[log_probs for *_, log_probs in rows],
            train_log_probs=[score(model, ids, tokens, options.temperature) for _, ids, tokens, _ in rows],
            token_ids=[tokens for _, _, tokens, _ in rows],
            prompt_token_ids=[ids for _, ids, *_ in rows],
            prompt_id=[name for name, *_ in rows],
            sequence_id=list(range(len(rows))),
        )
    print(f"wrote {len(rows)} responses to {len(prompts)} prompts, {sum(len(row[2]) for row in rows)} tokens")


def score(model, prompt, tokens, temperature):
    """Return the trainer's log-probs of a response. Replace this with the forward pass of your trainer."""
    ids = torch.tensor([prompt + tokens], device=model.device)
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
        return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()


def read_prompts(options):
    """Return the names and token ids of the prompts. If the tokenizer has a chat template, apply it to text."""
    with open(options.prompts, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    ids = [row.get("prompt_token_ids") for row in rows]
    if None in ids:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        for place, row in enumerate(rows):
            text = row.get("prompt")
            if text is not None and tokenizer.chat_template:
                chat = [{"role": "user", "content": text}]
                text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
                ids[place] = tokenizer(text, add_special_tokens=False)["input_ids"]
            elif text is not None:
                ids[place] = tokenizer(text)["input_ids"]
    return [str(row["prompt_id"]) for row in rows], ids


def load(model, dtype, device):
    """Load a checkpoint in evaluation mode."""
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()


def sample_with_vllm(prompts, options):
    """Sample with vLLM, in this process or on a server."""
    if options.where:
        body = {
            "model": options.model,
            "n": options.samples,
            "max_tokens": options.max_tokens,
            "logprobs": 1,
            "temperature": options.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "seed": options.seed,
            "return_tokens_as_token_ids": True,
        }
        answers = [post(f"{options.where}/v1/completions", body | {"prompt": ids}) for ids in prompts]
        found = [[choice["logprobs"] for choice in answer["choices"]] for answer in answers]
        return [
            [([int(name.rpartition(":")[2]) for name in one["tokens"]], one["token_logprobs"]) for one in own]
            for own in found
        ]
    from vllm import LLM, SamplingParams

    engine = LLM(
        options.model, dtype=options.engine_dtype, seed=options.seed, generation_config="vllm",
        logprobs_mode="processed_logprobs",
    )  # fmt: skip
    settings = SamplingParams(
        n=options.samples, max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed, logprobs=0
    )
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], settings)
    return [
        [
            (list(one.token_ids), [step[token].logprob for token, step in zip(one.token_ids, one.logprobs)])
            for one in output.outputs
        ]
        for output in outputs
    ]


def sample_with_sglang(prompts, options):
    """Sample with SGLang, in this process or on a server."""
    settings = {
        "max_new_tokens": options.max_tokens,
        "temperature": options.temperature,
        "n": 1,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
    }
    body = {"sampling_params": settings, "return_logprob": True}
    repeated = [ids for ids in prompts for _ in range(options.samples)]
    if options.where:
        answers = [post(f"{options.where}/generate", body | {"input_ids": ids}) for ids in repeated]
    else:
        import sglang

        engine = sglang.Engine(model_path=options.model, dtype=options.engine_dtype, random_seed=options.seed)
        answers = engine.generate(input_ids=repeated, **body)
        engine.shutdown()
    found = [answer["meta_info"]["output_token_logprobs"] for answer in answers]
    pairs = [([token for _, token, *_ in one], [log_prob for log_prob, *_ in one]) for one in found]
    return [pairs[start : start + options.samples] for start in range(0, len(pairs), options.samples)]


def sample_with_transformers(prompts, options):
    """Sample with transformers and a KV cache. The precision and the weights can differ from the trainer's."""
    model = load(options.where or options.model, options.engine_dtype, options.device)
    torch.manual_seed(options.seed)
    end = model.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [] if end is None else [end])
    settings = transformers.GenerationConfig(
        do_sample=True, temperature=options.temperature, top_k=0, top_p=1.0, max_new_tokens=options.max_tokens,
        num_return_sequences=options.samples, eos_token_id=end, pad_token_id=min(ends, default=0),
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    responses = []
    for ids in prompts:
        given = torch.tensor([ids], device=model.device)
        done = model.generate(given, attention_mask=torch.ones_like(given), generation_config=settings)
        logits = torch.stack(done.logits, 1).float() / options.temperature
        tokens = done.sequences[:, len(ids) :]
        log_probs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0].tolist()
        responses.append([cut(row, own, ends) for row, own in zip(tokens.tolist(), log_probs)])
    return responses


def cut(tokens, log_probs, ends):
    """Drop the padding after the first end token."""
    length = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:length], log_probs[:length]


def post(url, body):
    """Send JSON to a server and return its answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


ENGINES = {"vllm": sample_with_vllm, "sglang": sample_with_sglang, "transformers": sample_with_transformers}

if __name__ == "__main__":
    main()
