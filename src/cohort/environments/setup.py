"""The tools and environments of a run, made and checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from cohort.config import EnvironmentConfig, GRPOConfig
from cohort.environments.adapters import mcp
from cohort.environments.bridge import Bridge
from cohort.environments.calls import CallParser
from cohort.environments.episode import DIFFERENT, EpisodeSampler, TurnFormat
from cohort.environments.host import Host
from cohort.environments.shapes import Shape, find_environments
from cohort.environments.tools import Toolbox
from cohort.errors import ConfigError
from cohort.parallel import World
from cohort.plugins import load_function
from cohort.rewards import RewardRunner, as_reward_function, environment_reward
from cohort.rollout import Engine


def reward_runner(
    acting: Acting | None,
    given: Sequence[Any],
    config: GRPOConfig,
    *,
    not_negative: str | None = None,
    world: World | None = None,
) -> RewardRunner:
    """What scores the completions of a run or an evaluation.

    Args:
        acting: the tools and environments; None without.
        given: the reward functions. Without any, the environments' own reward.
        config: the settings.
        not_negative: the part of the objective that accepts no negative rewards; None: there is none.
        world: the ranks.

    Raises:
        ConfigError: ``environment_reward`` is given, and no environment gives rewards.
    """
    gives_rewards = acting is not None and acting.gives_rewards
    if not gives_rewards and any(one in ("environment_reward", environment_reward) for one in given):
        raise ConfigError(
            "the reward function environment_reward needs an environment that gives rewards: set environment.factory "
            "to one whose class has `step` or `get_reward`"
        )
    functions = given or (["environment_reward"] if gives_rewards else [])
    return RewardRunner(
        [as_reward_function(one) for one in functions],
        config.reward.weights,
        config.reward,
        per_token=config.resolved_objective.credit in ("process", "given"),
        not_negative=not_negative,
        world=world,
    )


@dataclass(frozen=True, slots=True)
class Acting:
    """The tools and environments of a run, and where they run."""

    settings: EnvironmentConfig
    toolbox: Toolbox
    shapes: Mapping[str, Shape]
    host: Host
    servers: ExitStack
    """The connections to servers of tools."""

    @classmethod
    def of(
        cls, settings: EnvironmentConfig, tools: Any = None, factory: Any = None, *, group_size: int = 1
    ) -> Acting | None:
        """The tools and environments of the settings and of the trainer's arguments; None if there are none.

        Args:
            settings: ``[environment]`` of the settings.
            tools: one or several further tools: functions, names as in the settings, or MCP servers as ``mcp.Client``
                takes them.
            factory: a callable that makes an environment, or several by name; replaces that of the settings.
            group_size: completions of one prompt, whose environments exist at the same time.

        Raises:
            ConfigError: a tool or environment cannot be used, two tools have one name, or too few environments may
                exist.
        """
        shapes = find_environments(factory or settings.factory)
        if shapes and settings.max_environments < group_size:
            raise ConfigError(
                f"environment.max_environments ({settings.max_environments}) must be at least the {group_size} "
                "completions of a prompt: their environments begin together"
            )
        further = [] if tools is None else tools if isinstance(tools, list | tuple) else [tools]
        given: list[Any] = []
        with ExitStack() as servers:
            for one in (*settings.tools, *further):
                given += servers.enter_context(closing(mcp.Server(one))).tools if mcp.is_server(one) else [one]
            toolbox = Toolbox(given)
            if not toolbox and not shapes:
                return None
            return cls(settings, toolbox, shapes, Host(toolbox, shapes, settings), servers.pop_all())

    def close(self) -> None:
        """End all episodes, stop the worker processes, and close the connections to servers of tools. Idempotent."""
        self.host.close()
        self.servers.close()

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """The JSON schemas of all tools, methods of environments included."""
        return [*self.toolbox.schemas, *(schema for shape in self.shapes.values() for schema in shape.tools.schemas)]

    @property
    def names(self) -> list[str]:
        """The names of the tools, and of the environments' classes."""
        return [*self.toolbox, *(shape.name for shape in self.shapes.values())]

    @property
    def gives_rewards(self) -> bool:
        """Whether environments may give rewards, so that no reward function is needed."""
        return any(shape.gives_rewards for shape in self.shapes.values())

    def schemas_of(self, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The JSON schemas of the tools that the policy can call in an episode of a row.

        Raises:
            DataError: the row names no tool or environment that exists, or lacks a column that ``reset`` needs.
        """
        return self.host.tools(row).schemas

    def turn_format(
        self, tokenizer: Any, end_token_ids: Collection[int], variables: Mapping[str, Any] | None = None
    ) -> TurnFormat:
        """How the chat template of a tokenizer writes turns.

        Args:
            tokenizer: the tokenizer, with the chat template in use.
            end_token_ids: tokens that end a turn.
            variables: of the template.

        Raises:
            ConfigError: the template cannot show tools or answers, or no parser finds its calls.
        """
        settings, schemas = self.settings, self.schemas
        roles = {"tool"} if schemas else set()
        roles |= {"user"} if any(shape.steps for shape in self.shapes.values()) else set()
        bridge = Bridge(
            tokenizer, end_token_ids, variables=variables, tools=schemas, roles=roles, history=settings.history
        )
        function = load_function(settings.parser, what="parser") if settings.parser else None
        parser = CallParser.of(tokenizer, schemas, function) if schemas else None
        is_function = settings.history not in ("append", "template")
        rewrite = load_function(settings.history, what="history") if is_function else None
        return TurnFormat(tokenizer, bridge, parser, rewrite)

    def sampler(
        self, engine: Engine, turn_format: TurnFormat, show: Callable[[str], None] | None = None
    ) -> EpisodeSampler:
        """What samples episodes with an engine; ``show`` gets the first one in words."""
        return EpisodeSampler(engine, self.host, turn_format, self.settings, show)

    def describe(self) -> str:
        """Tools, environments and limits in words."""
        settings = self.settings
        limits = [f"at most {settings.max_turns} turns"]
        if settings.max_turn_length is not None:
            limits.append(f"{settings.max_turn_length} tokens a turn")
        if settings.max_observation_tokens is not None:
            limits.append(f"{settings.max_observation_tokens} tokens an answer")
        if settings.episode_timeout is not None:
            limits.append(f"{settings.episode_timeout:g} s an episode")
        starts = ""
        if self.shapes and settings.starts == "own":
            starts = f"\neach completion's environment has its own seed (environment.starts). {DIFFERENT}"
        return f"episodes: {', '.join(limits)}\n{self.host.describe()}{starts}"
