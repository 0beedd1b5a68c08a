import re

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

CONFIG = {"max_turns": 3, "topk": 2}


async def search(query):
    return [f"Document {i} about {query[:10]}" for i in range(CONFIG["topk"])]


async def execute_predictions(text):
    match = re.search(r"<search>(.*?)</search>", text, re.DOTALL)
    if match:
        found = "\n".join(await search(match.group(1)))
        return f"\n\n<information>{found}</information>\n\n", False
    return "", True


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "Partial rollout is not supported for this function."
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_tokens_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, response_token_ids, loss_mask, log_probs = "", [], [], []
    output = None
    for _ in range(CONFIG["max_turns"]):
        payload = {
            "input_ids": prompt_tokens_ids + response_token_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        new_ids = [item[1] for item in meta["output_token_logprobs"]]
        response += output["text"]
        response_token_ids += new_ids
        loss_mask += [1] * len(new_ids)
        log_probs += [item[0] for item in meta["output_token_logprobs"]]
        if meta["finish_reason"]["type"] == "length":
            break
        observation, done = await execute_predictions(output["text"])
        if done:
            break
        ids = state.tokenizer(observation, add_special_tokens=False)["input_ids"]
        response += observation
        response_token_ids += ids
        loss_mask += [0] * len(ids)
        log_probs += [0.0] * len(ids)
    sample.tokens = prompt_tokens_ids + response_token_ids
    sample.response_length = len(response_token_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = log_probs
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "abort":
            sample.status = Sample.Status.ABORTED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample
