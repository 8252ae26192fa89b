"""Begins and ends the reasoning of an output: the end of its prompt, and the constraint after the reasoning."""

import msgspec

from octavo.frontend.conversation.context import ChatContext
from octavo.frontend.conversation.rendering import last_text
from octavo.frontend.conversation.request import ChatInput, ChatRequest
from octavo.frontend.reasoning.parser import SWITCHES, ReasoningParser, ReasoningState, wants_reasoning
from octavo.frontend.tools.plan import ToolPlan
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.structured import StructuredOutputsParams

REASONING_LIMIT = "thinking_token_budget"
"""The request's name of `max_reasoning_tokens`."""


def check_reasoning_limit(request: ChatRequest, reasoning: ReasoningParser | None) -> None:
    """Reject a request that limits its reasoning if the server does not separate reasoning.

    Raises:
        InvalidRequestError: the request has a limit; the error names its field.
    """
    if request.max_reasoning_tokens is not None and reasoning is None:
        raise InvalidRequestError(
            f"{REASONING_LIMIT} needs a server that separates reasoning (--reasoning-parser)", REASONING_LIMIT
        )


def begin_output(
    prompt: str, request: ChatRequest, plan: ToolPlan, context: ChatContext, reasoning: ReasoningParser
) -> tuple[str, ReasoningState]:
    """Return the prompt, and whether the output begins inside the reasoning.

    A constraint applies after the reasoning, and a reasoning limit applies only to an output that begins with
    reasoning. So if the template lets the model decide whether to reason, the prompt opens the reasoning, as the model
    would do. If the caller wants a constrained answer without reasoning, the constraint applies at once, even if the
    template has no variable for that. Otherwise the model would reason until the length limit.
    """
    shown = request.input
    wants = _wants_reasoning(shown, context)
    is_off = wants is False and _has_reasoning_switch(shown, context)
    continued = last_text(shown.messages[-1]) if shown.continue_final_message else ""
    state = reasoning.initial_state(prompt, continued, is_off=is_off)
    if not shown.add_generation_prompt or state is ReasoningState.OUTSIDE:
        return prompt, state
    if wants is False and state is ReasoningState.UNDECIDED and reasoning.skipping:
        return prompt + reasoning.skipping, ReasoningState.OUTSIDE
    must_begin_in_form = plan.form is not None and not plan.begins_free
    if must_begin_in_form and wants is False:
        return prompt + (reasoning.closing if state is ReasoningState.INSIDE else ""), ReasoningState.OUTSIDE
    if state is ReasoningState.INSIDE:
        return prompt, state
    thinks = wants or (wants is None and reasoning.thinks_by_default)
    if (must_begin_in_form or request.max_reasoning_tokens is not None) and not reasoning.ends:
        field = REASONING_LIMIT if plan.form is None else plan.form.name(*plan.form.kinds[:1])
        raise InvalidRequestError(
            f"{field} needs a reasoning parser that says how the reasoning ends, and the plugin of this server names no"
            ' mark for that: leave it out, or send "chat_template_kwargs": {"enable_thinking": false}',
            field,
        )
    if must_begin_in_form and not thinks:
        return prompt, ReasoningState.OUTSIDE
    if must_begin_in_form or (request.max_reasoning_tokens is not None and (thinks or wants is False)):
        return prompt + reasoning.opening, ReasoningState.INSIDE
    return prompt, state


def constrain_output(
    plan: ToolPlan, request: ChatRequest, state: ReasoningState, reasoning: ReasoningParser | None
) -> StructuredOutputsParams | None:
    """Return the constraint on the complete output: that of the tools or of the answer, starting after the reasoning.

    Raises:
        InvalidRequestError: the reasoning has a limit, and the constraint starts elsewhere.
    """
    form, limit = plan.form, request.max_reasoning_tokens
    if reasoning is None or state is not ReasoningState.INSIDE:
        return form
    markers = reasoning.end if len(reasoning.ends) == 1 else list(reasoning.ends)
    if form is not None and form.start_after is None:
        form = msgspec.structs.replace(form, start_after=markers)
    if limit is None:
        return form
    if form is None:
        return StructuredOutputsParams(start_after=markers, max_free_tokens=limit, param=REASONING_LIMIT)
    if form.markers[0] != reasoning.end:
        raise InvalidRequestError(
            f"{REASONING_LIMIT} ends the reasoning with {reasoning.end!r}, but {form.name('start_after')} starts the "
            f"constraint after {form.start_after!r}: leave one of them out",
            REASONING_LIMIT,
        )
    return msgspec.structs.replace(form, max_free_tokens=limit)


def _wants_reasoning(shown: ChatInput, context: ChatContext) -> bool | None:
    """Return whether the caller turns reasoning on or off; `None` if it does neither."""
    wants = wants_reasoning({**context.settings.template_defaults, **shown.variables})
    return False if wants is None and shown.reasoning_effort == "none" else wants


def _has_reasoning_switch(shown: ChatInput, context: ChatContext) -> bool:
    """Return whether the chat template can turn reasoning off. We assume that a caller's own template can."""
    return shown.template is not None or any(map(context.chat_template.has_variable, SWITCHES))
