//! From what a client wrote about sampling and length to what the engine does: the last place that sees optional
//! fields.

mod bounds;
mod words;

use crate::structure::{Grammar, Thought};
use crate::text::tokenizer::Tokenizer;
use bounds::ranged;
pub use bounds::{MAX_CHOICES, MAX_STOPS};
use std::sync::Arc;
use windlass_engine_api::error::FieldError;
use windlass_engine_api::generation::GenerationFields;
use windlass_engine_core::request::{BeamSearch, CacheScope, Penalties, Request, RequestId, Sampling, Tenant, TokenId};

/// How to generate, complete and in range.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Most tokens; `None` for all that fit.
    pub max_tokens: Option<u32>,
    /// Fewest tokens.
    pub min_tokens: u32,
    /// Strings that end the answer.
    pub stops: Vec<String>,
    /// Tokens that the client named to end it.
    pub stop_token_ids: Vec<TokenId>,
    /// How many answers.
    pub choices: Choices,
    /// What is shown of them.
    pub shows: Shows,
    /// Most tokens of the prompt that count, the last ones; `None` for all.
    prompt_tokens: Option<u32>,
    sampling: Sampling,
    ignore_eos: bool,
    priority: i32,
    cache_salt: Option<String>,
    grammar: Option<Grammar>,
    thought: Option<Thought>,
    /// Control tokens that are part of the text.
    pub marks: Arc<[TokenId]>,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
    /// The length penalty of a beam search, if that is asked for.
    beam_search: Option<f64>,
}

/// How many answers to one prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choices {
    /// Answers given.
    pub given: u32,
    /// Answers generated, at least as many: the most likely are given.
    pub generated: u32,
}

/// What is shown of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shows {
    /// What the model thought of its tokens.
    pub logprobs: bool,
    /// What the model thought of the prompt's, in a list of their own.
    pub prompt_logprobs: bool,
    /// The prompt, before the answer.
    pub prompt: bool,
    /// The stop string that ended it.
    pub stop: bool,
    /// Special tokens, as the vocabulary spells them.
    pub special_tokens: bool,
}

/// Whose a request is.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    /// Who pays.
    pub tenant: Tenant,
    /// Where its prompts are found and kept.
    pub cache_scope: CacheScope,
}

/// Which of the answers to one prompt a request is for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Choice {
    /// Its number.
    pub index: u32,
    /// The request for the first one, which computes the prompt for all.
    pub leader: Option<RequestId>,
}

impl Generation {
    /// Checks every value. The tokenizer bounds token ids, `random_seed` is used where the client gives none.
    pub fn validate(
        fields: GenerationFields,
        tokenizer: &Tokenizer,
        random_seed: u64,
    ) -> Result<Generation, FieldError> {
        let choices = bounds::choices(fields.n, fields.best_of)?;
        let shows = Shows {
            logprobs: fields.logprobs.is_some(),
            prompt_logprobs: fields.prompt_logprobs.is_some(),
            prompt: fields.echo,
            stop: fields.include_stop_str_in_output,
            special_tokens: fields.skip_special_tokens == Some(false),
        };
        let min_tokens = fields.min_tokens.unwrap_or(0);
        // An answer of no tokens is for what is told of the prompt.
        let fewest = u32::from(!shows.prompt && !shows.prompt_logprobs);
        bounds::check_lengths(fields.max_tokens, min_tokens, fewest)?;
        bounds::check_structure(fields.structure.as_ref(), min_tokens)?;
        let beam_search = bounds::beam_search(&fields)?;
        bounds::check_stops(&fields.stop)?;
        bounds::check_stop_tokens(&fields.stop_token_ids, tokenizer.vocabulary().len())?;
        let echoed = fields.logprobs.filter(|_| fields.echo);
        Ok(Generation {
            max_tokens: fields.max_tokens,
            min_tokens,
            choices,
            shows,
            prompt_tokens: bounds::prompt_tokens(fields.truncate_prompt_tokens)?,
            ignore_eos: fields.ignore_eos,
            beam_search,
            priority: fields.priority,
            grammar: None,
            thought: None,
            marks: Arc::default(),
            cache_salt: words::cache_salt(fields.cache_salt.clone())?,
            // The most likely answers are found by their log probabilities.
            logprobs: fields.logprobs.or((choices.generated > choices.given).then_some(0)),
            prompt_logprobs: fields.prompt_logprobs.max(echoed),
            sampling: sampling(&fields, tokenizer, random_seed)?,
            stops: fields.stop,
            stop_token_ids: fields.stop_token_ids,
        })
    }

    /// The engine's request for `prompt`. `ends` are the model's end-of-sequence tokens, `max_tokens` counts where the
    /// client gave no limit.
    pub fn request(
        &self,
        id: RequestId,
        client: Client,
        prompt: Vec<TokenId>,
        max_tokens: u32,
        ends: &[TokenId],
        choice: Choice,
    ) -> Request {
        let ends = if self.ignore_eos { &[] } else { ends };
        let seed = self.sampling.seed.wrapping_add(choice.index.into());
        let (leader, width) = (choice.leader.unwrap_or(id), self.choices.generated);
        Request {
            tenant: client.tenant,
            cache_scope: client.cache_scope,
            priority: self.priority,
            min_tokens: self.min_tokens,
            stop_tokens: [ends, &self.stop_token_ids].concat(),
            sampling: Sampling { seed, ..self.sampling.clone() },
            constraint: self.grammar.as_ref().map(|grammar| grammar.constraint(self.thought)),
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            fork_of: choice.leader,
            beams: self.beam_search.map(|length_penalty| BeamSearch { leader, width, length_penalty }),
            ..Request::greedy(id, prompt, self.max_tokens.unwrap_or(max_tokens))
        }
    }

    /// Answers must have this form.
    pub fn with_grammar(self, grammar: Option<Grammar>) -> Generation {
        Generation { grammar, ..self }
    }

    /// A form of the answer waits for thoughts before it, and these control tokens are shown.
    pub fn with_dialogue(self, thought: Option<Thought>, marks: Arc<[TokenId]>) -> Generation {
        Generation { thought, marks, ..self }
    }

    /// Only requests of the same salt share cached prompts.
    pub fn cache_salt(&self) -> Option<&str> {
        self.cache_salt.as_deref()
    }

    /// The part of a prompt that counts.
    pub fn cut(&self, mut prompt: Vec<TokenId>) -> Vec<TokenId> {
        let most = self.prompt_tokens.map_or(usize::MAX, |most| most as usize);
        prompt.drain(..prompt.len().saturating_sub(most));
        prompt
    }

    /// Requests that wait for each of `prompts`, and the tokens that they make others wait for: all answers to a prompt
    /// share it, and those of a search wait as one.
    pub fn backlog(&self, prompts: &[Vec<TokenId>]) -> (u32, u64) {
        let waiting = if self.beam_search.is_some() { 1 } else { self.choices.generated };
        let tokens: usize = prompts.iter().map(|prompt| prompt.len() + waiting as usize - 1).sum();
        (prompts.len() as u32 * waiting, tokens as u64)
    }

    /// Whether the prompt's log probabilities are wanted.
    pub fn scores_prompt(&self) -> bool {
        self.prompt_logprobs.is_some()
    }
}

fn sampling(fields: &GenerationFields, tokenizer: &Tokenizer, random_seed: u64) -> Result<Sampling, FieldError> {
    let vocabulary = tokenizer.vocabulary().len();
    Ok(Sampling {
        temperature: ranged("temperature", fields.temperature, 1.0, 0.0, 2.0)?,
        top_k: bounds::top_k(fields.top_k)?,
        top_p: bounds::share("top_p", fields.top_p)?,
        min_p: ranged("min_p", fields.min_p, 0.0, 0.0, 1.0)?,
        typical_p: bounds::share("typical_p", fields.typical_p)?,
        penalties: Penalties {
            repetition: ranged("repetition_penalty", fields.repetition_penalty, 1.0, 0.01, 100.0)?,
            frequency: ranged("frequency_penalty", fields.frequency_penalty, 0.0, -2.0, 2.0)?,
            presence: ranged("presence_penalty", fields.presence_penalty, 0.0, -2.0, 2.0)?,
        },
        logit_bias: words::logit_bias(&fields.logit_bias, vocabulary)?,
        bad_words: words::bad_words(&fields.bad_words, tokenizer)?,
        allowed_tokens: words::allowed_tokens(fields.allowed_token_ids.as_deref(), vocabulary)?,
        seed: fields.seed.map_or(random_seed, i64::cast_unsigned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bounds::MAX_STOP_BYTES;

    const CLIENT: Client = Client { tenant: Tenant(0), cache_scope: CacheScope::SHARED };

    fn validate(fields: GenerationFields) -> Result<Generation, FieldError> {
        Generation::validate(fields, &Tokenizer::words(), 7)
    }

    #[test]
    fn absent_fields_take_the_apis_defaults() {
        let generation = validate(GenerationFields::default()).unwrap();
        let expected = Sampling { seed: 7, ..Sampling::RANDOM };
        assert_eq!(generation.sampling, expected);
        let request = generation.request(RequestId(1), CLIENT, vec![1], 42, &[9], Choice::default());
        assert_eq!((request.max_tokens, request.stop_tokens), (42, vec![9]));
    }

    #[test]
    fn ignoring_the_end_keeps_the_clients_own_stop_tokens() {
        let fields = GenerationFields { ignore_eos: true, stop_token_ids: vec![3], ..Default::default() };
        let request = validate(fields).unwrap().request(RequestId(1), CLIENT, vec![1], 1, &[9], Choice::default());
        assert_eq!(request.stop_tokens, [3]);
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        type Set = fn(&mut GenerationFields);
        let cases: [(&str, Set); 38] = [
            ("temperature", |fields| fields.temperature = Some(-0.1)),
            ("temperature", |fields| fields.temperature = Some(2.1)),
            ("temperature", |fields| fields.temperature = Some(f64::NAN)),
            ("top_p", |fields| fields.top_p = Some(0.0)),
            ("top_p", |fields| fields.top_p = Some(1.1)),
            ("top_k", |fields| fields.top_k = Some(-2)),
            ("top_k", |fields| fields.top_k = Some(i64::MAX)),
            ("min_p", |fields| fields.min_p = Some(-1.0)),
            ("max_tokens", |fields| fields.max_tokens = Some(0)),
            ("min_tokens", |fields| (fields.max_tokens, fields.min_tokens) = (Some(1), Some(2))),
            ("length_penalty", |fields| fields.length_penalty = Some(0.5)),
            ("length_penalty", |fields| (fields.use_beam_search, fields.length_penalty) = (true, Some(f64::NAN))),
            ("use_beam_search", |fields| (fields.use_beam_search, fields.stop) = (true, vec![".".to_owned()])),
            ("best_of", |fields| (fields.use_beam_search, fields.best_of) = (true, Some(4))),
            ("cache_salt", |fields| fields.cache_salt = Some(String::new())),
            ("stop", |fields| fields.stop = vec![String::new()]),
            ("stop", |fields| fields.stop = vec!["x".repeat(MAX_STOP_BYTES + 1)]),
            ("stop", |fields| fields.stop = vec!["x".to_owned(); 10_000]),
            ("stop_token_ids", |fields| fields.stop_token_ids = vec![4_000_000]),
            ("typical_p", |fields| fields.typical_p = Some(0.0)),
            ("repetition_penalty", |fields| fields.repetition_penalty = Some(0.0)),
            ("repetition_penalty", |fields| fields.repetition_penalty = Some(f64::INFINITY)),
            ("frequency_penalty", |fields| fields.frequency_penalty = Some(2.5)),
            ("presence_penalty", |fields| fields.presence_penalty = Some(f64::NAN)),
            ("n", |fields| fields.n = Some(0)),
            ("n", |fields| fields.n = Some(129)),
            ("best_of", |fields| (fields.n, fields.best_of) = (Some(3), Some(2))),
            ("best_of", |fields| fields.best_of = Some(u32::MAX)),
            ("truncate_prompt_tokens", |fields| fields.truncate_prompt_tokens = Some(0)),
            ("logit_bias", |fields| fields.logit_bias = [("the".to_owned(), 1.0)].into()),
            ("logit_bias", |fields| fields.logit_bias = [("-1".to_owned(), 1.0)].into()),
            ("logit_bias", |fields| fields.logit_bias = [("1".to_owned(), 100.1)].into()),
            ("logit_bias", |fields| fields.logit_bias = (0..300_000).map(|id: u32| (id.to_string(), 0.0)).collect()),
            ("bad_words", |fields| fields.bad_words = vec![" ".to_owned()]),
            ("bad_words", |fields| fields.bad_words = vec!["x".to_owned(); 10_000]),
            ("allowed_token_ids", |fields| fields.allowed_token_ids = Some(vec![])),
            ("allowed_token_ids", |fields| fields.allowed_token_ids = Some(vec![4_000_000])),
            ("allowed_token_ids", |fields| fields.allowed_token_ids = Some(vec![1; 100_000])),
        ];
        for (name, set) in cases {
            let mut fields = GenerationFields::default();
            set(&mut fields);
            assert_eq!(validate(fields).unwrap_err().param.as_deref(), Some(name));
        }
    }
}
