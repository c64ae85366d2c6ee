"""jax_privacy: DP-SGD by its Keras API or its batch selection; facts are of jax_privacy 2.0.0.

`DPKerasConfig` computes ε for Poisson samples, and `fit` draws these only with `poisson_sampling_in_fit=True`; without
it Keras shuffles the records and goes through all of them. Gradients of `gradient_accumulation_steps` batches make one
update, and noise of standard deviation σ/√steps is added to each of them.
"""

from __future__ import annotations

import math

from silodp.accounting.accountant import EventCount
from silodp.accounting.charges import scale_to_person
from silodp.accounting.events import (
    Event,
    Gaussian,
    PoissonSampled,
    RevealedSample,
    SampledReplacement,
)
from silodp.errors import SilodpError
from silodp_audit.frameworks import base
from silodp_audit.frameworks._stated import compute_pld

_SELECTIONS = ("CyclicPoissonSampling", "FixedBatchSampling")
_METHODS = {"POISSON": 1.0, "FIXED_BATCH_SIZE": 2.0}
"""`SamplingMethod` of `DpsgdTrainingAccountant` → by which factor it divides the noise multiplier."""


class JaxPrivacy(base.Framework):
    """jax_privacy."""

    name = "jax_privacy"
    files = "a flat TOML, JSON or YAML file with the arguments of DPKerasConfig"
    without_effect = ("epsilon", "clipping_norm", "rescale_to_unit_norm", "microbatch_size", "seed")

    def check(self, settings: base.FrameworkSettings, delta: float | None) -> base.Finding:
        """Return what holds for Poisson samples, fixed batches, or shuffled records."""
        if "epsilon" in settings and "noise_multiplier" not in settings:
            raise SilodpError(
                "noise_multiplier is missing: DPKerasConfig has chosen it for epsilon; print "
                "model.get_noise_multiplier() after make_private, and give noise_multiplier=... with it.",
                code="argument.missing",
                field="noise_multiplier",
            )
        noise, rounds = settings.number("noise_multiplier"), settings.whole("rounds", default=1)
        batch, size = settings.whole("batch_size"), settings.whole("train_size", "num_samples")
        if batch > size:
            raise SilodpError(
                f"batch_size is {batch}, and there are {size} records: correct one of them.",
                code="argument.conflict",
                field="batch_size",
            )
        # Batches: `fit` compares the number of all its batches with train_steps.
        batches = settings.whole("train_steps", "num_updates")
        merged = settings.whole("gradient_accumulation_steps", default=1)
        rate = batch / size
        selection = settings.choice("batch_selection", _SELECTIONS, "")
        is_poisson = (
            selection == "CyclicPoissonSampling"
            if selection
            else settings.flag("poisson_sampling_in_fit", default=False)
        )

        def charges(records: int) -> list[EventCount]:
            if is_poisson:
                # A record may be in each of the batches that are merged, by a coin for each.
                release: Event = Gaussian(noise / (merged * records))
                if rate < 1:
                    release = scale_to_person(PoissonSampled(rate, Gaussian(noise)), merged * records)
                return [(release, rounds * math.ceil(batches / merged))]
            if selection:
                return [(_charge_fixed_batch(rate, noise, records), rounds * batches)]
            # In one batch of an epoch. An update may have batches of two epochs, where these are not multiples of it;
            # every batch has noise of its own.
            in_epoch = size // batch
            spread = noise if in_epoch % merged == 0 else noise / math.sqrt(merged)
            return [(Gaussian(spread / records), rounds * math.ceil(batches / in_epoch))]

        found = settings.delta(delta, "delta")
        method = settings.choice("sampling_method", _METHODS, "POISSON")
        differences = []
        if not is_poisson and method == "POISSON":
            differences.append(
                "it counts every step as a Poisson sample, "
                + (
                    "but in batches of a fixed size every record replaces another one (sampling_method = "
                    "FIXED_BATCH_SIZE counts that)"
                    if selection
                    else "but fit goes through shuffled records, unless poisson_sampling_in_fit is true: an epoch "
                    "costs as much as one step with all records"
                )
            )
        if method != "POISSON" and selection == "FixedBatchSampling":
            differences.append(
                "it composes a sampled release with twice the sensitivity, which is a bound for one step at ε ≥ 0 and "
                "does not dominate the step itself (docs/privacy.md, section 4, W)"
            )
        if merged > 1:
            differences.append(
                f"it counts batches of {batch}, but an update has {merged} of them, and the noise is for the update"
            )
        if rounds > 1:
            differences.append("it is about one round, and the rounds add up")
        drawn = "batches of a fixed size" if selection else "shuffled records"
        drawn = "Poisson samples" if is_poisson else drawn
        finding = base.Finding(
            self.name,
            f"DP-SGD, noise_multiplier {noise:g}, {drawn}, {batch} of {size:,} records in a batch, {batches:,} batches",
            found,
            rounds,
            (
                *base.no_guarantee(
                    base.SERVER, "the noise is for single records, and a client has many", (base.CLIENT,)
                ),
                *base.bound_units(base.SERVER, found, charges, base.RECORDS),
            ),
            # DPKerasConfig has a coarser grid, and takes batch_size where it needs that of an update.
            compute_pld(noise / _METHODS[method], rate, batches, found, 1e-4 if selection else 1e-3),
            f"for a record, by DpsgdTrainingAccountant{f' ({method})' if selection else ' of DPKerasConfig'}",
            tuple(differences),
            (
                "the number of records and of steps is public, and every gradient is finite",
                "no layer mixes records (make_private does not look for BatchNorm)",
                "losses and metrics of the training records, which fit returns, stay secret",
                "nobody knows the seed of the noise",
                "a person's records are at most as many as stated, in all clients together",
                *(
                    ["fit ends an epoch before it begins another one"]
                    if not is_poisson and not selection
                    else []
                ),
            ),
        )
        return base.exclude_entries(finding, settings, "buffers", base.BUFFERS)


def _charge_fixed_batch(rate: float, noise: float, records: int) -> Event:
    """Return the event of a step on a batch of a fixed size, drawn without replacement.

    Where a record is drawn, another one is not, and the sum without both is up to two clips from either world; so a
    record counts as replaced, with twice the sensitivity (docs/privacy.md, section 4, W). Of several records at least
    one is drawn with at most `records` times the probability, and they move the sum by at most as many clips.
    """
    if records == 1 and rate < 1:
        return SampledReplacement(rate, Gaussian(noise / 2))
    return RevealedSample(min(1.0, records * rate), Gaussian(noise / records))
