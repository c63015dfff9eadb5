"""Descriptions of request fields for the OpenAPI document, beyond their types and bounds.

Keys are field names, or `Type.field` where the same name means something else. Bounds that a type
cannot express are here: those between two fields, over a whole request, or from the configuration
file.
"""

from __future__ import annotations

ASKED = {
    # ---- OpenAI's
    "model": "A model's name or alias; without one it is `server.default_model`, else the first",
    "stream": "Send the answer in pieces, as it is generated",
    "stream_options": "Options of a stream",
    "include_usage": "Send a last chunk, without choices, with the token counts",
    "queue_position": "servekit's own: a comment for each new place in the queue",
    "messages": "The conversation. `server.limits.messages` may allow fewer",
    "prompt": "A text, several, or token ids. Prompts times `n` are 128 at most",
    "max_tokens": "Tokens to generate at most; with the prompt they have to fit the context",
    "max_completion_tokens": "The newer name of `max_tokens`; it takes precedence",
    "temperature": "0 is greedy; the default is the model's own",
    "top_p": "Choose among the most probable tokens that together have this probability",
    "top_k": "Choose among this many most probable tokens; 0 and -1: among all",
    "min_p": "Choose among tokens with at least this share of the best one's probability",
    "seed": "The same seed gives the same answer; of `n` choices each has the next one",
    "presence_penalty": "Taken from the logit of each token that is in the answer already",
    "frequency_penalty": "Taken from a token's logit for each time it is in the answer already",
    "repetition_penalty": "Divides the logits of tokens in prompt and answer; 1 is off",
    "stop": (
        "The answer ends before the first of these; `server.limits.stop_strings` may allow fewer."
        " They do not end a tool call that was ordered by `tool_choice`"
    ),
    "ignore_eos": "Go on to `max_tokens`; a `response_format` still ends where nothing may follow",
    "min_tokens": (
        "Generate at least this many tokens, at most `max_tokens`; beside a `response_format` only"
        " as long as it allows anything but the end"
    ),
    "user": "Has no effect",
    "safety_identifier": "Has no effect",
    "service_tier": "Has no effect",
    "prompt_cache_retention": "Has no effect",
    "guided_decoding_backend": "Has no effect",
    "request_id": "Has no effect; a header `X-Request-Id` names a request",
    "stop_token_ids": "The answer ends before the first of these tokens; `stop_reason` names it",
    "include_stop_str_in_output": (
        "Keep the stop string or token that ended the answer as a part of it"
    ),
    "bad_words": (
        "Words that never occur: their tokens, at the beginning of a text and after a space"
    ),
    "truncate_prompt_tokens": (
        "Keep this many tokens of the prompt's end; -1: as many as fit beside `max_tokens`; 0: all"
    ),
    "prompt_logprobs": (
        "Log probabilities of the prompt's tokens, and of this many best; not in a stream"
    ),
    "structured_outputs": "The form of the answer, enforced token by token; one of these fields",
    "json": "A JSON schema, or its text",
    "regex": "A regular expression in the Rust dialect, of the whole answer",
    "choice": "The answer is one of these",
    "grammar": "A grammar in llguidance's Lark dialect, or in GBNF with a rule `root`",
    "json_object": "Any JSON object",
    "guided_json": "The older name of `structured_outputs.json`",
    "guided_regex": "The older name of `structured_outputs.regex`",
    "guided_choice": "The older name of `structured_outputs.choice`",
    "guided_grammar": "The older name of `structured_outputs.grammar`",
    "guided_whitespace_pattern": "Not supported",
    "structural_tag": "Not supported",
    "whitespace_pattern": "Not supported",
    "disable_any_whitespace": "Not supported but for false",
    "disable_additional_properties": "Not supported but for false",
    "allowed_token_ids": "Not supported",
    "use_beam_search": "Not supported but for false",
    "skip_special_tokens": "Not supported but for true",
    "CompletionRequest.max_tokens": (
        "Tokens to generate at most; with the prompt they have to fit the context; 0: none, for"
        " `echo` and `prompt_logprobs`"
    ),
    "prompt_cache_key": (
        "Requests of one key go to one replica of the model, as long as that is not busier than the"
        " others; a header `X-Session-Id` does the same, and takes precedence"
    ),
    "n": "Choices, each a request of its own in the queue",
    "logit_bias": "Added to the logits of tokens, by id (see /tokenize); at most 4096",
    "priority": "servekit's own: lower goes earlier, a step is worth ten seconds of waiting",
    "timeout_s": "servekit's own: seconds, waiting included; the model's `timeout_s` is the most",
    "logprobs": "Return the log probabilities of the tokens, as the model has them",
    "CompletionRequest.logprobs": "Return log probabilities, and those of this many best tokens",
    "top_logprobs": "Also return those of this many best tokens; needs `logprobs`",
    "response_format": "The form of the answer, enforced token by token",
    "tools": "Functions that the model may call; names are 1 to 64 letters, digits, _ and -",
    "tool_choice": "`none`, `auto`, `required`, a function by name, or `allowed_tools`",
    "parallel_tool_calls": "false: one call at most",
    "chat_template_kwargs": 'More arguments of the chat template: `{"enable_thinking": false}`',
    "reasoning_effort": "For the chat template; `none` also turns thinking off",
    "separate_reasoning": "servekit's own; false: leave thoughts in `content`",
    "continue_final_message": (
        "Continue the last message, which is the beginning of the assistant's"
    ),
    "add_generation_prompt": "false only with `continue_final_message`",
    "echo": "Begin the answer with the prompt; with `logprobs` those of its tokens come first",
    "role": "The speaker; `developer` is treated as `system`",
    "content": "Text, or parts of type text",
    "name": "Name of the speaker, of the tool or of the function",
    "tool_calls": "Calls that the assistant made in this turn",
    "tool_call_id": "The call that this message answers",
    "refusal": "The text of a refusal",
    "reasoning_content": "The assistant's thoughts, as servekit returned them",
    "reasoning": "Another name of `reasoning_content`",
    "type": "The kind of object",
    "text": "The text",
    "function": "The function and its arguments",
    "arguments": "The text of a JSON object",
    "id": "The id, as it was received",
    "json_schema": "The schema, if `type` is `json_schema`",
    "schema": (
        "A JSON schema, nested as deep as `server.limits.schema_depth` allows. Of `format`s"
        " date-time, time, date, duration, email, hostname, ipv4, ipv6, uuid and uri are enforced;"
        " any other is an annotation"
    ),
    "strict": "Schemas are always enforced",
    "Function.strict": "Enforce the schema on calls",
    "Tool.strict": "Enforce the schema on calls",
    "description": "Description for the model, if its template shows it",
    # refused if they are set
    "functions": "Not supported; use `tools`",
    "function_call": "Not supported; use `tool_choice`",
    "audio": "Not supported",
    "modalities": "Text only",
    "prediction": "Not supported",
    "web_search_options": "Not supported",
    "best_of": "Not supported, except with the value of `n`",
    "suffix": "Not supported",
    # ---- responses
    "ResponsesRequest.input": "A text, or the items of the whole conversation so far",
    "instructions": "A system message before the input",
    "max_output_tokens": "Tokens to generate at most, thoughts included",
    "ResponsesRequest.text": "The form of the text",
    "ResponsesRequest.reasoning": "How much to think, for models that think",
    "format": "The form of the answer, enforced token by token",
    "verbosity": "Has no effect",
    "effort": "For the chat template; `none` also turns thinking off",
    "summary": "Has no effect",
    "metadata": "Has no effect",
    "ResponsesRequest.metadata": "Repeated in the response; has no effect",
    "ResponsesRequest.stream_options": "Has no effect",
    "max_tool_calls": "Has no effect",
    "truncation": "Nothing is cut off: input that is too long is refused",
    "store": "Nothing is stored",
    "include": "`message.output_text.logprobs` has an effect",
    "call_id": "Id of this call, or of the call that this item answers",
    "output": "The result of the function",
    "parameters": "The JSON schema of the arguments",
    "previous_response_id": "Refused: nothing is stored; send the whole conversation",
    "conversation": "Refused: nothing is stored; send the whole conversation",
    "ResponsesRequest.prompt": "Refused: nothing is stored; send the whole conversation",
    "background": "Refused unless false",
    # ---- embeddings and tokens
    "input": "A text or token ids, or up to 2048 of either; each has to fit the model's context",
    "encoding_format": "Numbers, or base64 of float32, little-endian",
    "dimensions": "Length of the vectors: the first numbers of each, normalised again",
    "TokenizeRequest.prompt": "The text; either this or `messages`",
    "TokenizeRequest.messages": "A conversation, by the model's template",
    "add_special_tokens": "Always true",
    "TokenizeRequest.add_generation_prompt": "Always true",
    "tokens": "Token ids, each below the model's vocabulary",
    # ---- Anthropic's
    "MessagesRequest.max_tokens": (
        "Tokens to generate at most; a value beyond the context means its end"
    ),
    "system": "A system message before the others",
    "thinking": "Whether to think and to return the thoughts",
    "Block.thinking": "The assistant's thoughts",
    "Block.type": "text, thinking, tool_use or tool_result; images and documents are refused",
    "Block.input": "The arguments of the call",
    "tool_use_id": "Id of the call that gave this result",
    "is_error": "The tool failed: the model reads `Error: ` before the result",
    "budget_tokens": "A wish, handed to the chat template; less than `max_tokens`",
    "stop_sequences": "Like OpenAI's `stop`; the answer says which string ended it",
    "output_config": "The form of the answer",
    "output_format": "The older form of `output_config.format`",
    "input_schema": "The JSON schema of its input",
    "ToolChoice.type": "`any` requires a call, `tool` a call of the named tool",
    "disable_parallel_tool_use": "true: one call at most",
    "user_id": "Has no effect",
    "inference_geo": "Has no effect",
    "cache_control": "Has no effect",
    "mcp_servers": "Not supported",
    "container": "Not supported",
    "context_management": "Not supported",
    # ---- Ollama's
    "options": "Sampling parameters. Options for loading have no effect: the file decides",
    "keep_alive": "How long a model that comes and goes stays after this: seconds, or a duration"
    " such as 5m; 0: it goes, below 0: it stays",
    "think": "Whether to think, or how much; refused for a model that does not think",
    "num_predict": "Tokens to generate at most; below 1: as far as the context goes",
    "repeat_penalty": "Divides the logits of tokens in prompt and answer; 1 is off",
    "repeat_last_n": "0 turns `repeat_penalty` off; else it looks at all of the text",
    "mirostat": "Not supported but for 0",
    "tfs_z": "Not supported but for 0 and 1",
    "typical_p": "Not supported but for 0 and 1",
    "images": "Not supported: the models take text",
    "tool_name": "The tool whose result this is",
    "GenerateRequest.prompt": "The prompt; without one the model is only checked to be loaded",
    "raw": "Take the prompt as it is, without the chat template",
    "template": "Not supported; `raw` goes without one",
    "context": "Not supported; use /api/chat",
    "truncate": "Cut texts to the model's context (the default) rather than refuse them",
    "EmbedRequest.input": "A text, or several",
    "EmbeddingsRequest.prompt": "The text",
    "NameRequest.name": "The older name of `model`",
    "NameRequest.stream": "Has no effect",
    "insecure": "Has no effect",
    "verbose": "Has no effect",
    "NameRequest.system": "Has no effect",
    "NameRequest.template": "Has no effect",
    "NameRequest.options": "Has no effect",
    # ---- HuixiangDou's
    "InferenceRequest.prompt": "The question",
    "history": "The rounds before it: a question and its answer each",
    "backend": "A model's name; any other is the first model in the file",
    "remote": "The name of `backend` in older clients",
    # ---- adapters
    "lora_name": "The name that requests use",
    "lora_path": "A folder on servekit's machine with adapter_config.json, from /; or a hub id",
    "base_model_name": "The base model; may be left out if there is only one",
    "load_inplace": "Replace the adapter that has this name now",
    "any_base": "servekit's own: load it even if it names another base",
}

#: Accepted values of fields whose type allows any value: by field, or `Type.field`.
TAKEN: dict[str, tuple[object, ...]] = {
    "ContentPart.type": ("text", "refusal"),
    "ResponsesRequest.previous_response_id": (None,),
    "ResponsesRequest.conversation": (None,),
    "ResponsesRequest.prompt": (None,),
    "ResponsesRequest.background": (None, False),
    "mcp_servers": (None, []),
    "container": (None,),
    "context_management": (None,),
}
