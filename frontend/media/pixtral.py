"""Loads Pixtral's processor without torchvision, which it imports but does not need."""

import sys
from collections.abc import Callable
from typing import Any


def allow_pixtral(assign: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let this process load Pixtral's processor.

    Its module imports one function from torchvision's image processor; the PIL image processor has the same function.

    Args:
        assign: replaces an attribute; tests undo it later.
    """
    from transformers.models import pixtral
    from transformers.models.pixtral import image_processing_pil_pixtral

    name = "transformers.models.pixtral.image_processing_pixtral"
    before = sys.modules.get(name)
    sys.modules[name] = image_processing_pil_pixtral
    try:
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
    assign(pixtral, "PixtralProcessor", PixtralProcessor)
