"""Prompts with images and recordings: vLLM's own processor puts these in their places.

The processor runs in the worker, and the core gets its tensors with the request. Each image and
recording is known by a hash of its content, under which the core keeps what it has made of it, and
by which its prefix cache tells prompts apart.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from servekit.engines.api.base import MediaPrompt
from servekit.engines.api.load_phases import phase
from servekit.engines.media import media_prompts
from servekit.engines.media.media_prompts import make_probes
from servekit.engines.media.media_warnings import warn_unavailable
from servekit.engines.media.recording import Samples
from servekit.engines.text.tokenizer import TokenizerCodec
from servekit.engines.vllm.probes import Probes
from servekit.errors import EngineFailed, LoadError, Unsupported, describe_error
from servekit.protocol.messages import WorkerSpec
from servekit.protocol.tasks import NOUNS
from servekit.protocol.types import Modality

#: vLLM's names of the modalities.
_NAMES: dict[Modality, str] = {"images": "image", "audio": "audio"}


def load_processor(config: Any, tokenizer: Any, spec: WorkerSpec) -> Any | None:
    """Return vLLM's `InputProcessor` of a model that reads images or recordings, and use its chat
    template.

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
            if not {"image", "audio"} & info.get_supported_mm_limits().keys():
                return None
            own = getattr(info.get_hf_processor(), "chat_template", None)
    except Exception as error:  # a missing file or package, or anything of the libraries
        warn_unavailable(spec.model, describe_error(error))
        return None
    if own and not spec.chat_template:
        tokenizer.chat_template = own
    return inputs


def prove_media(
    inputs: Any, codec: TokenizerCodec, probes: Probes, spec: WorkerSpec
) -> tuple[MediaEncoder | None, tuple[Modality, ...]]:
    """Return the encoder of images and recordings, and which of them the model reads.

    Warns of what it does not read. Raises LoadError if the core dies of it.
    """
    read: list[Modality] = []
    try:
        with phase("images"):
            encoder = MediaEncoder(inputs, codec)
    except Exception as error:  # of the libraries: texts are served anyway
        warn_unavailable(spec.model, describe_error(error))
        return None, ()
    for modality in encoder.modalities:
        try:
            with phase("images"):
                probes.read_media(encoder.encode_chat(make_probes(modality)[:1]))
            read.append(modality)
        except EngineFailed as error:
            without = f"`limit_mm_per_prompt: {{{_NAMES[modality]}: 0}}`"
            raise LoadError(
                f"{spec.model} died of its trial of {NOUNS[modality]}: {error} With {without} in"
                " the option engine_args it serves without them."
            ) from error
        except Exception as error:  # of the libraries or the model: texts are served anyway
            warn_unavailable(spec.model, describe_error(error), modality)
    return encoder if read else None, tuple(read)


class MediaEncoder(media_prompts.MediaEncoder):
    """The encoder of conversations with images and recordings for one core.

    Any thread may use it.
    """

    def __init__(self, inputs: Any, codec: TokenizerCodec) -> None:
        """`inputs` is the result of `load_processor`.

        Raises RequestError if the chat template has no place for images or recordings.
        """
        info = inputs.renderer.mm_processor.info
        super().__init__(info.get_hf_processor(), codec.template)
        limits = info.get_supported_mm_limits()
        self._marks = {one: self._marks[one] for one in self._marks if _NAMES[one] in limits}
        self._inputs = inputs
        self._codec = codec

    def _make_prompt(self, text: str, pictures: list[Any], sounds: list[Samples]) -> MediaPrompt:
        """Return the prompt, with its media as `mm_features` of the core."""
        from vllm.sampling_params import SamplingParams

        ids = self._codec.encode_plain(text)
        media = {"image": pictures, "audio": [(one, self._rate) for one in sounds]}
        given = {name: files for name, files in media.items() if files}
        prompt = {"prompt_token_ids": ids, "multi_modal_data": given}
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
        if len(request.mm_features or ()) != len(pictures) + len(sounds):
            noun = "images" if pictures else "recordings"
            raise Unsupported(
                f"messages: the model has no place for these {noun}", param="messages"
            )
        return MediaPrompt(ids, request.mm_features)


def name_features(features: Any, lora: Any) -> Any:
    """Return the `mm_features` of a request, which an adapter may read in its own way."""
    if not features or lora is None:
        return features
    return [
        dataclasses.replace(one, identifier=f"{lora.lora_name}:{one.identifier}")
        for one in features
    ]
