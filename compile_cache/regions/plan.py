"""The plan of a boot: calls that the headers of stored artifacts name, ordered before anybody makes them.

This module imports torch's compiler. It is used on a thread beside the predictions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import nn

from compile_cache.aot.call_inputs import make_call
from compile_cache.aot.describe import class_name, is_inference, structure, structure_digest
from compile_cache.aot.known_calls import KnownCall
from compile_cache.regions.region import Region
from compile_cache.settings import Settings

log = logging.getLogger("compile_cache")


def order_known(regions: Iterable[Region], calls: Iterable[KnownCall], settings: Settings) -> int:
    """Order each call whose region has the structure that the call was compiled for; how many were ordered."""
    instances = {
        (class_name(type(module)), structure_digest(structure(module))): (region, module)
        for region in regions
        for module in region.stored.instances()
    }
    count = 0
    for call in calls:
        found = instances.get((call.class_name, call.structure))
        # Of one graph for many sizes (None), the sizes that it was made of are compiled.
        is_ours = call.mode == settings.mode and call.dynamic in (settings.dynamic, None)
        if found and is_ours and call.call is not None:
            count += _order(*found, call)
    log.info("plan.ordered calls=%d", count)
    return count


def _order(region: Region, module: nn.Module, call: KnownCall) -> bool:
    """Raises nothing: a call that cannot be made is left out."""
    try:
        with torch.no_grad(), torch.inference_mode(is_inference(call.switches)):
            args, kwargs = make_call(call.call)
            return region.ordering.order_ahead(module, args, kwargs)
    except (ValueError, RuntimeError) as error:  # inputs that do not fit, or no memory
        log.info("plan.not_made class=%s error=%s", call.class_name, error)
        return False
