"""The processor of a model that reads images or recordings: it makes token ids and tensors.

The library's image processors run with torchvision, or with Pillow alone, and it takes what is
installed. Many processors have a part for videos, which needs torchvision; where that is missing
they are loaded without the part, as no video ever comes here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import image_processing_auto, modeling_auto, processing_auto
from transformers.utils.import_utils import is_torchvision_available

from servekit.engines.media.media_warnings import warn_unavailable
from servekit.engines.model_files.model_kind import read_json
from servekit.engines.transformers import weights
from servekit.errors import Unsupported, describe_error
from servekit.protocol.messages import WorkerSpec

_VIDEOS = "video_processor"


def load_processor(folder: Path, spec: WorkerSpec) -> Any | None:
    """Return the processor of a model that reads text, and images or recordings.

    None for any other model, and, with a warning, for one whose processor cannot be loaded: that
    model serves text.
    """
    kind = weights.read_model_type(folder)
    if kind not in modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        return None
    try:
        processor = _load(folder, spec, kind)
        if not _has_media_part(processor):
            raise Unsupported("its folder has no image processor and no feature extractor")
    except Exception as error:  # a missing file or package, or anything that the library raises
        warn_unavailable(spec.model, describe_error(error))
        return None
    if spec.chat_template:
        processor.chat_template = spec.chat_template
    return processor


def _has_media_part(processor: Any) -> bool:
    names = ("image_processor", "feature_extractor", "audio_processor")
    return any(getattr(processor, name, None) is not None for name in names)


def _load(folder: Path, spec: WorkerSpec, kind: str) -> Any:
    trust = {"local_files_only": True, "trust_remote_code": spec.trust_remote_code}
    library: Any = transformers
    known: Any = processing_auto
    name = known.PROCESSOR_MAPPING_NAMES.get(kind) or _read_class(folder)
    named: Any = getattr(library, str(name), None)
    parts: list[str] = getattr(named, "get_attributes", list)()
    if is_torchvision_available() or _VIDEOS not in parts:
        return library.AutoProcessor.from_pretrained(folder, **trust)
    # By its module: 5.17 exports a placeholder that asks for torchvision.
    images: Any = image_processing_auto.AutoImageProcessor
    autos = {"image_processor": images, "tokenizer": library.AutoTokenizer}
    autos["feature_extractor"] = library.AutoFeatureExtractor
    made = [None if p == _VIDEOS else autos[p].from_pretrained(folder, **trust) for p in parts]
    stated, _ = named.get_processor_dict(folder, **trust)
    unchecked = {"check_argument_for_proper_class": lambda self, name, part: None}
    without: Any = type(named.__name__, (named,), unchecked)
    return without.from_args_and_dict(made, stated)


def _read_class(folder: Path) -> str:
    """Return the name of the processor's class that the folder states; "" if it states none."""
    for file in ("processor_config.json", "preprocessor_config.json"):
        stated = read_json(folder / file)
        if isinstance(stated, dict) and isinstance(stated.get("processor_class"), str):
            return str(stated["processor_class"])
    return ""
