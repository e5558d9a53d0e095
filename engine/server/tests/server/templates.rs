//! Chat templates in the processes that run them: what they see, and what becomes of those that mean harm.

use crate::common::{Client, FAST, PROGRAM, SLOW, chat, get, serve, within};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use windlass_engine::text::chat_template::{ChatTemplate, TemplateError};
use windlass_engine::text::renderers::Renderers;
use windlass_engine::text::tokenizer::SpecialTokens;
use windlass_engine_api::chat::{Conversation, Message, Rendering, Role};
use windlass_engine_api::tools::{FunctionCall, Tool, ToolCall, ToolChoice, Tools};

async fn rendered(source: &str, conversation: &Conversation) -> Result<String, TemplateError> {
    let (bos_text, eos_text) = ("<s>".to_owned(), "</s>".to_owned());
    let special = SpecialTokens { bos_text, eos_text, ..SpecialTokens::default() };
    let template = ChatTemplate::of_request(source, &special, &Renderers::new(PROGRAM.into(), 1)).await?;
    template.render(conversation).await
}

async fn render(source: &str) -> Result<String, TemplateError> {
    let messages = vec![Message::new(Role::User, "hi"), Message::new(Role::Assistant, "ho")];
    rendered(source, &Conversation { messages, tools: None, rendering: Rendering::default() }).await
}

async fn render_call(source: &str) -> Result<String, TemplateError> {
    let function = FunctionCall { name: "f".to_owned(), arguments: "{\"a\": \"é<\"}".to_owned() };
    let call = ToolCall { id: "c1".to_owned(), kind: "function".to_owned(), function };
    let messages = vec![Message { tool_calls: vec![call], ..Message::new(Role::Assistant, "") }];
    let parameters = json!({"type": "object"});
    let tool = Tool { name: "f".to_owned(), description: None, parameters, strict: false };
    let tools = Some(Tools { offered: vec![tool], choice: ToolChoice::Auto, parallel: true });
    rendered(source, &Conversation { messages, tools, rendering: Rendering::default() }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_and_calls_reach_the_template_as_python_writes_them() {
    let source = "{{ tools[0] | tojson }}{% for call in messages[0].tool_calls %} {{ call.id }} \
        {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}";
    let expected = "{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"type\": \"object\"}}} \
        c1 f {\"a\": \"é<\"}";
    assert_eq!(render_call(source).await.unwrap(), expected);
    // Some templates put the text together themselves.
    let source = "{{ '<' + messages[0].tool_calls[0].function.arguments + '>' }}";
    assert_eq!(render_call(source).await.unwrap(), "<{\"a\": \"é<\"}>");
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_set_variables_and_go_on_with_messages() {
    let source = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if think %}T{% endif %}\
        {% if add_generation_prompt %}>{% endif %}";
    let messages = vec![Message::new(Role::User, "a"), Message::new(Role::Assistant, "Once upon ")];
    let render_with = async |rendering: Rendering| {
        rendered(source, &Conversation { messages: messages.clone(), tools: None, rendering }).await.unwrap()
    };
    let think = serde_json::from_value(json!({"think": true})).unwrap();
    assert_eq!(render_with(Rendering { variables: think, ..Rendering::default() }).await, "[a][Once upon ]T>");
    let on = Rendering { add_generation_prompt: false, continue_final_message: true, ..Rendering::default() };
    assert_eq!(render_with(on).await, "[a][Once upon");
    let special = SpecialTokens::default();
    let template = ChatTemplate::of_request(source, &special, &Renderers::new(PROGRAM.into(), 1)).await.unwrap();
    assert!(template.takes("think") && !template.takes("messages") && !template.takes("other"));
}

#[tokio::test(flavor = "multi_thread")]
async fn templates_see_what_they_are_written_for() {
    let source = "{{ bos_token }}{% for message in messages %}\n\
        {% if message['role'] == 'user' %}U:{{ message.content.strip().upper() }}{% else %}A:{{ message.content }}{% endif %}\n\
        {% endfor %}{% if add_generation_prompt and not tools %}>{% endif %}{{ eos_token }}";
    assert_eq!(render(source).await.unwrap(), "<s>U:HIA:ho></s>");
    let none = "{{ tools is none }} {{ documents is none }} {{ other is defined }}";
    assert_eq!(render(none).await.unwrap(), "True True False");
    let year = render("{{ strftime_now('%Y') }}").await.unwrap();
    assert!(year.parse::<u32>().is_ok_and(|year| year >= 2024), "{year}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_carries_the_templates_words() {
    let error = render("{{ raise_exception('roles must alternate') }}").await.unwrap_err();
    assert_eq!(error, TemplateError::Refused("roles must alternate".to_owned()));
}

/// Each would take a server's memory, its stack or its time, or does what templates must not.
fn hostile() -> Vec<String> {
    let doubled = "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";
    let nested = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}\
        {% set ns.y = [ns.y, ns.y] %}{% endfor %}";
    let deep = "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}";
    let thrice = |body: &str| {
        let range = "range(99999)";
        format!(
            "{{% for a in {range} %}}{{% for b in {range} %}}{{% for c in {range} %}}{body}{{% endfor %}}{{% endfor %}}{{% endfor %}}"
        )
    };
    vec![
        thrice("x"),
        thrice("{{ messages | tojson }}"),
        doubled.to_owned(),
        format!("{doubled}{{{{ ns.x | length }}}}"),
        format!("{nested}{{{{ ns.x }}}}"),
        format!("{nested}{{{{ ns.x | tojson }}}}"),
        format!("{nested}{{{{ ns.x == ns.y }}}}"),
        format!("{nested}{{% set t %}}{{{{ ns.x }}}}{{% endset %}}"),
        format!("{deep}{{{{ ns.x }}}}"),
        format!("{deep}{{{{ ns.x | tojson }}}}"),
        "{% for a in range(9999) %}{{ 'x' * 99999 }}{% endfor %}".to_owned(),
        "{% set t %}{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}{% endset %}".to_owned(),
        format!("{{% set t %}}{{% for a in range(99999) %}}{}{{% endfor %}}{{% endset %}}", "x".repeat(100_000)),
        format!("{{{{ ({}) | length }}}}", ["('x' * 99999999)"; 40].join(" ~ ")),
        "{{ ('x' * 99999999) | replace('x', 'y' * 99999999) }}".to_owned(),
        "{{ ('a\\n' * 999999) | indent(99999) }}".to_owned(),
        "{{ ([1] * 99999999) | list | length }}{{ ([1] * 99999999) | join('x' * 99999) }}".to_owned(),
        "{{ '%999999999d' | format(1) }}{{ '{:>999999999}'.format(1) ~ '{:>999999999}'.format(1) }}".to_owned(),
        "{{ range(99999) | slice(99999999) | list }}".to_owned(),
        "{{ messages | batch(99999999, 'x' * 99) | list }}".to_owned(),
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".to_owned(),
        "{{ messages.__class__.__mro__ }}{{ undefined_function() }}".to_owned(),
        "{% include '/etc/passwd' %}".to_owned(),
        "{% for message in messages %}".to_owned(),
        "{{ ".to_owned() + &"(".repeat(100_000),
        "x".repeat((1 << 20) + 1),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_templates_end_in_an_error() {
    for source in hostile() {
        let began = Instant::now();
        let shown: String = source.chars().take(200).collect();
        let result = within(&shown, render(&source)).await;
        assert!(result.is_err(), "{shown}: {:.100}", result.unwrap_or_default());
        println!("{:?} {:?} {shown:.80}", began.elapsed(), result);
    }
}

/// Each is ended by what it takes, and not by a limit of something else.
#[tokio::test(flavor = "multi_thread")]
async fn a_template_is_told_what_it_took_too_much_of() {
    let long = "'x' * 99999999";
    let large = format!("{{{{ [{long}, {long}, {long}] | length }}}}");
    let pair = "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}";
    let compared = format!(
        "{{% set ns = namespace(x=[1], y=[1]) %}}{{% for i in range(60) %}}{pair}{{% endfor %}}{{{{ ns.x == ns.y }}}}"
    );
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}".to_owned();
    let (time, memory) = ("longer than 1s", "more memory than it may");
    // Where pages come slowly, so much memory takes too much time.
    for (source, told) in [(large, [memory, time]), (compared, [time; 2]), (endless, ["fuel"; 2])] {
        let error = within(&source, render(&source)).await.unwrap_err().to_string();
        assert!(told.iter().any(|told| error.contains(told)), "{source}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_brings_its_template_where_the_flags_let_it() {
    let server = serve(&format!("{FAST} --trust-request-chat-template")).await;
    let tokenize = async |extra: Value| server.post("/tokenize", &chat(extra)).await;
    let count = async |extra: Value| tokenize(extra).await.json()["count"].as_u64().unwrap();
    let own = count(json!({})).await;
    let twice = "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.role }} {{ m.content }} {% endfor %}";
    assert_eq!(count(json!({"chat_template": twice})).await, 2 * own);
    let told = json!({"chat_template": "{{ word }} {{ word }}", "chat_template_kwargs": {"word": "engine"}});
    assert_eq!(count(told).await, 2);
    for (template, code) in [("{% if %}", "invalid_value"), ("{{ raise_exception('no') }}", "invalid_conversation")] {
        let refused = tokenize(json!({"chat_template": template})).await;
        assert_eq!((refused.status.as_u16(), &refused.json()["error"]["code"]), (400, &json!(code)), "{template}");
    }
    let nested = json!({"chat_template_kwargs": {"chat_template": "x"}});
    assert_eq!(tokenize(nested).await.status.as_u16(), 400, "hidden in its variables");
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_templates_at_once_disturb_neither_streams_nor_probes_nor_other_conversations() {
    let server = serve(&format!("{SLOW} --trust-request-chat-template")).await;
    let mut client = Client::connect(server.api).await;
    let mut canary = client.open("/v1/chat/completions", &chat(json!({"max_tokens": 300, "stream": true}))).await;
    let (server, sources) = (&server, hostile());
    let ask = |source: &String| {
        let body = json!({"chat_template": source, "max_tokens": 1});
        async move { server.chat(body).await }
    };
    let attacks = futures::future::join_all(sources.iter().take(16).map(ask));
    let others = async {
        let mut slowest = Duration::ZERO;
        for _ in 0..20 {
            let began = Instant::now();
            assert_eq!(get(server.api, "/health").await.status.as_u16(), 200);
            slowest = slowest.max(began.elapsed());
            // Rendered by the model's own template, in another process.
            let answer = within("a conversation beside them", server.chat(json!({"max_tokens": 1}))).await;
            assert_eq!(answer.status.as_u16(), 200, "{}", answer.text());
        }
        slowest
    };
    let (answers, slowest) = within("all are refused", futures::future::join(attacks, others)).await;
    for (answer, source) in answers.iter().zip(&sources) {
        // Those that wait too long for the others are asked to come back.
        assert!([400, 429].contains(&answer.status.as_u16()), "{source:.100}: {}", answer.text());
    }
    println!("slowest probe {slowest:?}");
    assert!(canary.read_until("[DONE]").await, "the stream beside them was cut");
}
