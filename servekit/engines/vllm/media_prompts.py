"""Prompts with images: vLLM's own processor puts these in their places.

The processor runs in the worker, and the core gets its tensors with the request. Each image is
known by a hash of its pixels, under which the core keeps what it has made of it, and by which its
prefix cache tells prompts apart.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import structlog

from servekit.engines.api.base import MediaPrompt
from servekit.engines.api.load_phases import phase
from servekit.engines.text import media_prompts
from servekit.engines.text.media_prompts import make_probes
from servekit.engines.text.tokenizer import TokenizerCodec
from servekit.engines.vllm.probes import Probes
from servekit.errors import EngineFailed, LoadError, Unsupported, describe_error
from servekit.protocol.messages import WorkerSpec

log: Any = structlog.get_logger(__name__)


def load_processor(config: Any, tokenizer: Any, spec: WorkerSpec) -> Any | None:
    """Return vLLM's `InputProcessor` of a model that reads images, and use its chat template.

    None of any other model and, with a warning, if the processor cannot be loaded.
    """
    if not config.model_config.is_multimodal_model:
        return None
    try:
        with phase("images"):
            from vllm.v1.engine.input_processor import InputProcessor

            inputs = InputProcessor(config)
            if not inputs.supports_mm_inputs:  # `limit_mm_per_prompt` allows none
                return None
            info = inputs.renderer.mm_processor.info
            if "image" not in info.get_supported_mm_limits():
                return None
            own = getattr(info.get_hf_processor(), "chat_template", None)
    except Exception as error:  # a missing file or package, or anything of the libraries
        _warn_text_only(spec, error)
        return None
    if own and not spec.chat_template:
        tokenizer.chat_template = own
    return inputs


def prove_images(
    inputs: Any, codec: TokenizerCodec, probes: Probes, spec: WorkerSpec
) -> MediaEncoder | None:
    """Return the encoder of images if the model reads one; otherwise warn, and return None.

    Raises LoadError if the core dies of it.
    """
    try:
        with phase("images"):
            encoder = MediaEncoder(inputs, codec)
            probes.read_images(encoder.encode(make_probes()[:1]))
            return encoder
    except EngineFailed as error:
        raise LoadError(
            f"{spec.model} died of an image: {error} With `limit_mm_per_prompt: {{image: 0}}` in"
            " the option engine_args it serves texts."
        ) from error
    except Exception as error:  # of the libraries or the model: texts are served anyway
        _warn_text_only(spec, error)
        return None


def _warn_text_only(spec: WorkerSpec, error: Exception) -> None:
    log.warning("images_unavailable", model=spec.model, reason=describe_error(error))


class MediaEncoder(media_prompts.MediaEncoder):
    """The encoder of conversations with images for one core; any thread may use it."""

    def __init__(self, inputs: Any, codec: TokenizerCodec) -> None:
        """`inputs` is the result of `load_processor`.

        Raises RequestError if the chat template has no place for images.
        """
        super().__init__(inputs.renderer.mm_processor.info.get_hf_processor(), codec.template)
        self._inputs = inputs
        self._codec = codec

    def _make_prompt(self, text: str, pictures: list[Any]) -> MediaPrompt:
        """Return the prompt, with the images as `mm_features` of the core."""
        from vllm.sampling_params import SamplingParams

        ids = self._codec.encode_plain(text)
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}
        unused = SamplingParams(max_tokens=1, detokenize=False)
        # Without the cache that leaves out tensors which the core has: it goes wrong if a request
        # with some of them does not reach the core.
        made = self._inputs.renderer.process_for_engine(prompt, time.time(), skip_mm_cache=True)
        ids = made["prompt_token_ids"]
        if len(ids) >= self._inputs.model_config.max_model_len:
            return MediaPrompt(ids, [])  # the worker refuses it
        request = self._inputs.process_inputs(
            request_id="", prompt=made, params=unused, supported_tasks=("generate",)
        )
        if len(request.mm_features or ()) != len(pictures):
            raise Unsupported("messages: the model has no place for these images", param="messages")
        return MediaPrompt(ids, request.mm_features)


def name_features(features: Any, lora: Any) -> Any:
    """Return the `mm_features` of a request, which an adapter may read in its own way."""
    if not features or lora is None:
        return features
    return [
        dataclasses.replace(one, identifier=f"{lora.lora_name}:{one.identifier}")
        for one in features
    ]
