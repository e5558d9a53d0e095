//! The text side of a hub folder: `tokenizer.json`, run by the `tokenizers` crate, and what the files beside it say of
//! special tokens and the chat template.

use super::byte_level;
use super::guarded::guarded;
use super::spm;
use super::tokenizer::{END_SPELLINGS, MAX_VOCABULARY, SpecialTokens, TokenizerError};
use super::tokenizer_file::{self, Decoder};
use super::vocabulary::Vocabulary;
use serde_json::Value;
use tokenizers::Tokenizer;
use windlass_checkpoint::HubFolder;
use windlass_engine_core::request::TokenId;

/// What a folder's files say together.
pub struct HubText {
    /// The encoder.
    pub encoder: Tokenizer,
    /// Bytes of every token.
    pub vocabulary: Vocabulary,
    /// Tokens with a function.
    pub special: SpecialTokens,
}

/// Reads the tokenizer of a folder.
pub fn read(folder: &HubFolder) -> Result<HubText, TokenizerError> {
    let (encoder, decoder) = tokenizer_file::read(folder)?;
    let vocabulary = vocabulary(&encoder, Spelling::of(&decoder)?)?;
    let special = special(folder, &encoder)?;
    Ok(HubText { encoder, vocabulary, special })
}

/// The chat template: a file of its own, or a string in the tokenizer's configuration, or in the file that models of more
/// than text have for it.
pub fn chat_template(folder: &HubFolder) -> Result<Option<String>, TokenizerError> {
    if let Some(template) = folder.text("chat_template.jinja")? {
        return Ok(Some(template));
    }
    for name in ["tokenizer_config.json", "chat_template.json"] {
        let config = folder.json(name)?.unwrap_or_default();
        if let Some(template) = template_in(&config["chat_template"]) {
            return Ok(Some(template.to_owned()));
        }
    }
    Ok(None)
}

/// A template as configurations write it: its text, or several under names.
fn template_in(value: &Value) -> Option<&str> {
    match value {
        Value::Array(named) => named.iter().find(|template| template["name"] == "default")?["template"].as_str(),
        template => template.as_str(),
    }
}

/// How the vocabulary spells bytes, which its decoder tells.
#[derive(Clone, Copy)]
enum Spelling {
    /// GPT-2's printable characters.
    ByteLevel,
    /// Text with U+2581 for spaces, and `<0xAB>`.
    SentencePiece,
}

impl Spelling {
    fn of(decoder: &Decoder) -> Result<Spelling, TokenizerError> {
        let steps = decoder.decoders.as_deref().unwrap_or(std::slice::from_ref(decoder));
        let kinds: Vec<&str> = steps.iter().map(|step| step.kind.as_str()).collect();
        let has = |name: &str| kinds.contains(&name);
        match () {
            () if has("ByteLevel") => Ok(Spelling::ByteLevel),
            () if has("ByteFallback") || has("Metaspace") => Ok(Spelling::SentencePiece),
            () => Err(TokenizerError::Decoder(kinds.join(", "))),
        }
    }

    fn append(self, spelling: &str, bytes: &mut Vec<u8>) {
        match self {
            Spelling::ByteLevel => byte_level::append_bytes(spelling, bytes),
            Spelling::SentencePiece => spm::append_bytes(spelling, bytes),
        }
    }
}

fn vocabulary(encoder: &Tokenizer, spelling: Spelling) -> Result<Vocabulary, TokenizerError> {
    let ids = encoder.get_vocab(true);
    let count = ids.values().max().map_or(0, |largest| *largest as usize + 1);
    if count == 0 || count > MAX_VOCABULARY {
        return Err(invalid(format!("tokenizer.json has {count} token ids; there must be 1 to {MAX_VOCABULARY}")));
    }
    let mut spellings = vec![String::new(); count];
    ids.into_iter().for_each(|(text, id)| spellings[id as usize] = text);
    let added = encoder.get_added_tokens_decoder();
    let mut vocabulary = Vocabulary::default();
    for (text, id) in spellings.iter().zip(0u32..) {
        match added.get(&id) {
            Some(token) if token.special => vocabulary.push_control(&token.content),
            Some(token) => vocabulary.push(|bytes| bytes.extend_from_slice(token.content.as_bytes())),
            None => vocabulary.push(|bytes| spelling.append(text, bytes)),
        }
    }
    Ok(vocabulary)
}

fn special(folder: &HubFolder, encoder: &Tokenizer) -> Result<SpecialTokens, TokenizerError> {
    let config = folder.json("tokenizer_config.json")?.unwrap_or_default();
    let generation = folder.json("generation_config.json")?.unwrap_or_default();
    let text = |name: &str| token_text(&config[name]);
    let (bos_text, eos_text) = (text("bos_token"), text("eos_token"));
    let mut ends: Vec<TokenId> = encoder.token_to_id(&eos_text).into_iter().collect();
    ends.extend(ids(&folder.config()["eos_token_id"]));
    ends.extend(ids(&generation["eos_token_id"]));
    let added = encoder.get_added_tokens_decoder();
    let spelled = added.iter().filter(|(_, token)| token.special && END_SPELLINGS.contains(&token.content.as_str()));
    ends.extend(spelled.map(|(id, _)| *id));
    ends.sort_unstable();
    ends.dedup();
    // What the tokenizer puts around nothing begins with what it puts before every prompt.
    let around = guarded(|| encoder.encode_fast("", true)).map_err(invalid)?;
    let bos = encoder.token_to_id(&bos_text);
    let prefix = around.get_ids().first().copied().filter(|id| Some(*id) == bos);
    Ok(SpecialTokens { prefix, ends, bos_text, eos_text })
}

/// A token as configurations write it: its text, or an object with its text.
fn token_text(value: &Value) -> String {
    value.as_str().or(value["content"].as_str()).unwrap_or_default().to_owned()
}

/// One id or a list of them.
fn ids(value: &Value) -> Vec<TokenId> {
    let id = |value: &Value| value.as_u64().and_then(|id| TokenId::try_from(id).ok());
    value.as_array().map_or_else(|| id(value).into_iter().collect(), |list| list.iter().filter_map(id).collect())
}

fn invalid(problem: String) -> TokenizerError {
    TokenizerError::Invalid(problem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine as _;
    use base64::prelude::BASE64_STANDARD;
    use serde_json::json;
    use windlass_checkpoint::testing::SafetensorsBuilder;

    /// A folder, and what keeps its files.
    struct Folder {
        hub: HubFolder,
        _files: tempfile::TempDir,
    }

    /// A folder with these files beside a configuration and no weights.
    fn folder(files: &[(&str, Value)]) -> Folder {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
        write("config.json", br#"{"eos_token_id": 5}"#);
        write("model.safetensors", &SafetensorsBuilder::new().build());
        files.iter().for_each(|(name, json)| write(name, json.to_string().as_bytes()));
        Folder { hub: HubFolder::open(folder.path()).unwrap(), _files: folder }
    }

    /// A byte-level tokenizer with this decoder that begins every prompt with `<s>`.
    fn tokenizer(decoder: Value) -> Value {
        let added = |id: u32, content: &str, special: bool| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special})
        };
        let begin = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
        let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": bytes,
            "added_tokens": [added(4, "<s>", true), added(5, "</s>", true), added(6, "<tool>", false), added(7, "<|im_end|>", true)],
            "post_processor": {"type": "TemplateProcessing", "single": [begin, text("A")],
                "pair": [text("A"), text("B")],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]}}},
            "decoder": decoder,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": {"a": 0, "b": 1, "ab": 2, "\u{120}": 3}, "merges": [["a", "b"]]},
        })
    }

    fn byte_level() -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true})
    }

    #[test]
    fn a_folder_tells_tokens_bytes_beginnings_and_ends() {
        let config = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "T"});
        let generation = json!({"eos_token_id": [5, 6]});
        let files = [
            ("tokenizer.json", tokenizer(byte_level())),
            ("tokenizer_config.json", config),
            ("generation_config.json", generation),
        ];
        let folder = folder(&files);
        let HubText { encoder, vocabulary, special } = read(&folder.hub).unwrap();
        assert_eq!(encoder.encode_fast("ab a<tool>", false).unwrap().get_ids(), [2, 3, 0, 6]);
        let pieces: Vec<&[u8]> = (0..8).map(|id| vocabulary.piece(id)).collect();
        assert_eq!(pieces, [&b"a"[..], b"b", b"ab", b" ", b"", b"", b"<tool>", b""]);
        assert_eq!(vocabulary.spelling(4), b"<s>");
        assert_eq!((special.prefix, special.ends), (Some(4), vec![5, 6, 7]));
        assert_eq!((special.bos_text.as_str(), special.eos_text.as_str()), ("<s>", "</s>"));
        assert_eq!(chat_template(&folder.hub).unwrap().as_deref(), Some("T"));
    }

    /// As a tool leaves them that trained on short texts.
    #[test]
    fn prompts_are_neither_cut_nor_padded_as_the_file_says() {
        let mut json = tokenizer(byte_level());
        json["truncation"] = json!({"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0});
        json["padding"] = json!({"strategy": {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "a"});
        let encoder = read(&folder(&[("tokenizer.json", json)]).hub).unwrap().encoder;
        assert_eq!(encoder.encode_fast("ab a", false).unwrap().get_ids(), [2, 3, 0]);
    }

    /// The tokenizers library panics at the first, and would at the first text of the second.
    #[test]
    fn files_that_contradict_themselves_are_refused() {
        let mut json = tokenizer(byte_level());
        json["model"]["merges"] = json!([["ab", "ab"]]);
        let refusal = read(&folder(&[("tokenizer.json", json)]).hub).map(drop).unwrap_err().to_string();
        assert!(
            refusal.ends_with("tokenizer.json: it contradicts itself: the tokenizers library panicked"),
            "{refusal}"
        );
        let mut json = tokenizer(byte_level());
        json["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0});
        let tokenizer =
            crate::text::tokenizer::Tokenizer::from_folder(&folder(&[("tokenizer.json", json)]).hub).unwrap();
        let refusal = tokenizer.encode("a").unwrap_err().to_string();
        assert!(refusal.ends_with("it contradicts itself: the tokenizers library panicked"), "{refusal}");
    }

    #[test]
    fn a_table_of_characters_that_leads_out_of_itself_is_refused() {
        let mut json = tokenizer(byte_level());
        let table = json!({"type": "Precompiled", "precompiled_charsmap": BASE64_STANDARD.encode([0; 4])});
        json["normalizer"] = json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, table]});
        let refusal = read(&folder(&[("tokenizer.json", json)]).hub).map(drop).unwrap_err().to_string();
        assert!(refusal.contains("precompiled_charsmap: its trie is empty"), "{refusal}");
    }

    #[test]
    fn pieces_of_sentence_piece_are_text_and_bytes() {
        let decoder = json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]});
        let mut json = tokenizer(decoder);
        json["model"]["vocab"] = json!({"a": 0, "b": 1, "<0x0A>": 2, "\u{2581}a": 3});
        json["model"]["merges"] = json!([]);
        let vocabulary = read(&folder(&[("tokenizer.json", json)]).hub).unwrap().vocabulary;
        assert_eq!([vocabulary.piece(3), vocabulary.piece(2)], [&b" a"[..], b"\n"]);
    }

    #[test]
    fn templates_may_be_named_and_files_may_be_missing_or_wrong() {
        let templates =
            json!({"chat_template": [{"name": "tool_use", "template": "A"}, {"name": "default", "template": "B"}]});
        assert_eq!(chat_template(&folder(&[("tokenizer_config.json", templates)]).hub).unwrap().as_deref(), Some("B"));
        let beside = [("tokenizer_config.json", json!({})), ("chat_template.json", json!({"chat_template": "C"}))];
        assert_eq!(chat_template(&folder(&beside).hub).unwrap().as_deref(), Some("C"));
        assert_eq!(chat_template(&folder(&[]).hub).unwrap(), None);
        assert!(matches!(read(&folder(&[]).hub), Err(TokenizerError::NoTokenizerFile)));
        let word_piece = tokenizer(json!({"type": "WordPiece", "prefix": "##", "cleanup": true}));
        let refused = read(&folder(&[("tokenizer.json", word_piece)]).hub);
        assert!(matches!(refused, Err(TokenizerError::Decoder(name)) if name == "WordPiece"));
        assert!(matches!(
            read(&folder(&[("tokenizer.json", json!({"model": 3}))]).hub),
            Err(TokenizerError::Invalid(_))
        ));
        let mut huge = tokenizer(byte_level());
        huge["model"]["vocab"]["x"] = 4_000_000_000u32.into();
        assert!(matches!(read(&folder(&[("tokenizer.json", huge)]).hub), Err(TokenizerError::Invalid(_))));
    }
}
