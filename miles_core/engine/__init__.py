"""The rollout engine: paged KV cache, scheduler, sampler, and the step that ties them to the model."""
