//! Compiling a form to see whether that can be done, in a process that may end of it.
//!
//! `llguidance` compiles by recursion and keeps copies of what references lead to: some kilobytes of a form may take
//! more stack or memory than there is. What a process survived ([`crate::text::renderer_process`]) is compiled in the
//! same way here, on a larger stack. The vocabulary makes no difference before there are masks.

use super::form::Source;
use super::prepared::limits;
use llguidance::api::GrammarInit;
use llguidance::earley::Parser;
use llguidance::toktrie::ApproximateTokEnv;
use llguidance::{Logger, panic_utils};
use std::panic::AssertUnwindSafe;

/// Compiles it as far as that can be done without a vocabulary. What is wrong with it is found again where there is one.
pub fn try_out(source: &Source) {
    let Ok(grammar) = source.grammar() else { return };
    let compile = || {
        let grammar =
            GrammarInit::Serialized(grammar).to_cgrammar(None, &mut Logger::new(0, 0), limits(), Vec::new())?;
        Parser::new(ApproximateTokEnv::single_byte_env(), grammar, limits(), Default::default())
    };
    let _ = panic_utils::catch_unwind(AssertUnwindSafe(compile));
}
