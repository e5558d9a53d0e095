//! Writes against a server at its own contract.

use super::*;
use crate::testing::FakeApi;

const ACCOUNT: &str = "/api/v1/namespaces/n/serviceaccounts/llama";
const DEPLOYMENT: &str = "/apis/apps/v1/namespaces/n/deployments/llama";

async fn apply(api: &FakeApi, step: Step) -> Result<(), Error> {
    let applier = Applier::new(api.client(), Arc::default(), Metrics::new().expect("names"), "operator-0");
    applier.apply(&("n".into(), "llama".into()), &Observed::default(), &[step]).await
}

#[tokio::test]
async fn a_deletion_spares_a_namesake_that_was_made_meanwhile() {
    let api = FakeApi::default();
    let metadata = json!({"namespace": "n", "name": "llama", "uid": "new"});
    api.put(ACCOUNT, json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}));
    for (uid, stays) in [("old", true), ("new", false)] {
        let step = Step::Delete { kind: Kind::ServiceAccount, name: "llama".into(), uid: uid.into() };
        apply(&api, step).await.expect("neither is a failure");
        assert_eq!(api.get(ACCOUNT).is_some(), stays, "{uid}");
    }
}

#[tokio::test]
async fn replicas_have_a_manager_of_their_own() {
    let api = FakeApi::default();
    let metadata = json!({"namespace": "n", "name": "llama"});
    api.put(
        DEPLOYMENT,
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {"replicas": 1}}),
    );
    apply(&api, Step::Scale { deployment: "llama".into(), replicas: 3 }).await.expect("scaled");
    assert_eq!(api.managers(), [(format!("{DEPLOYMENT}/scale"), SCALE_MANAGER.to_owned())]);

    let account = ServiceAccount {
        metadata: ObjectMeta { name: Some("llama".into()), ..ObjectMeta::default() },
        ..ServiceAccount::default()
    };
    apply(&api, Step::Apply(Object::ServiceAccount(account))).await.expect("applied");
    assert_eq!(api.managers(), [(ACCOUNT.to_owned(), FIELD_MANAGER.to_owned())]);
}
