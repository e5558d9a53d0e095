// One program that is every part of the test cluster: the control plane, the node agent, cluster DNS, the
// sandbox's process, and the clients kubectl and helm. One module and one link, because the parts share most of
// their code and a cold build of it is the longest step on a new machine.
//
// The part is chosen by the name it is called by (a link named `kubectl`) or else by the first argument.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	kcm "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// Parts that are cobra commands and run by Kubernetes' own runner, which sets up logging and flags.
var commands = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": kcm.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kube-proxy":              proxy.NewProxyCommand,
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"kubectl":                 func() *cobra.Command { return kubectl.NewDefaultKubectlCommand() },
}

// Parts with a main function of their own.
var programs = map[string]func(){
	"etcd":    func() { etcdmain.Main(os.Args) },
	"coredns": coredns,
	"helm":    helm,
}

func main() {
	name := filepath.Base(os.Args[0])
	if !known(name) {
		if len(os.Args) < 2 || !known(os.Args[1]) {
			fmt.Fprintln(os.Stderr, "usage: kube PART [ARGUMENT...]")
			os.Exit(2)
		}
		os.Args = os.Args[1:]
		name = os.Args[0]
	}
	if program, ok := programs[name]; ok {
		program()
		return
	}
	os.Exit(cli.Run(commands[name]()))
}

func known(name string) bool {
	return commands[name] != nil || programs[name] != nil
}
